"""Tracing: spans made from the timelines of ended requests, for an OpenTelemetry collector."""
