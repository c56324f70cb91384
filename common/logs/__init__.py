"""Logs of all processes: lines.py has the format, throttle.py the rate limit."""

from common.logs.lines import Fields, Format, kv, setup

__all__ = ["Fields", "Format", "kv", "setup"]
