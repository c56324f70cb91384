"""Logs as all programs write them: lines.py says how a line looks, throttle.py how many come."""

from common.logs.lines import Fields, Format, kv, setup

__all__ = ["Fields", "Format", "kv", "setup"]
