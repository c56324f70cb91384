"""Tracing: spans made from timelines when a request has ended, for an OpenTelemetry collector."""
