"""One log format for every program: time, level, program, sentence, key=value.

Modules log with the standard `logging.getLogger(__name__)`; `kv` puts fields at the end of a
sentence, quoted so that what a client sent can never look like a line or a field of ours.
"""

import logging
import sys
from datetime import UTC, datetime

_MAX_VALUE = 300  # characters of one field; what comes from outside has no other bound here


def setup(program: str, level: str) -> None:
    """Sends the whole process's log to stderr. Called once, by the program.

    Args:
        program: shown in every line, such as "decode" or "decode/engine".
        level: of `FrontConfig.log_level`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(program))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def kv(**fields: object) -> str:
    """`peer=127.0.0.1:50100 reason="no answer"`: values are bounded, and quoted where needed."""
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > _MAX_VALUE:
        text = text[:_MAX_VALUE] + "..."
    if text and text.isascii() and text.isprintable() and not set(text) & set(" =\"'\\"):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


class _Formatter(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {program} %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return f"{datetime.fromtimestamp(record.created, UTC):%FT%T.%f}"[:-3] + "Z"
