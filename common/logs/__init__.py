"""Logs of all processes: lines.py has the format, throttle.py the rate limit."""

from common.logs.lines import Format, LogFields, kv, setup

__all__ = ["Format", "LogFields", "kv", "setup"]
