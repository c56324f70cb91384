"""One log format for all processes, as text or JSON: time, level, program, message, fields.

Modules log with the standard `logging.getLogger(__name__)`, a sentence and `kv`:

    log.info("hand-off failed %s", kv(request_id=request.request_id, reason=reason))

In text, the fields follow the sentence. They are quoted, so that text from clients cannot look like
a line or field of Baton.

`ThrottledLog` limits lines that unauthenticated callers can cause, by kind of line. The last line
of a full interval says that more are suppressed, and the first line after it says how many. Lines
about Baton's own processes use `logging`.
"""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Format = Literal["text", "json"]
log = logging.getLogger(__name__)
# Characters that need no quotes: printable ASCII except space, =, quotes and backslash.
_PLAIN = re.compile(r"[!#-&(-<>-\[\]-~]+")
_MAX_VALUE = 300  # characters of a field, which may be text from others
_LINE = ("time", "level", "program", "logger", "message", "exception", "traceback")


def setup(program: str, level: str, log_format: Format = "text") -> None:
    """Set up logging to stderr for the whole process, including warnings and uncaught exceptions.

    Called once, at the start of a process.

    Args:
        program: shown in every line, such as "decode" or "decode engine".
        level: see `ServerConfig.log_level`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(program) if log_format == "json" else _Text(program))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Not shown, and costs time in each line: file, thread, process.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root.setLevel(level.upper())
    logging.getLogger("grpc").setLevel(max(root.level, logging.INFO))  # DEBUG logs a line per call
    # grpc logs a traceback for each malformed response. The caller gets None and reports it.
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable


def in_use() -> tuple[str, Format]:
    """Return the level and format of this process's log, for `setup` in a child process."""
    root = logging.getLogger()
    is_json = any(isinstance(handler.formatter, _Json) for handler in root.handlers)
    return logging.getLevelName(root.level), "json" if is_json else "text"


class LogFields:
    """Fields of a log line, rendered only if the line is written."""

    __slots__ = ("fields",)

    def __init__(self, fields: Mapping[str, object]) -> None:
        self.fields = fields

    def __str__(self) -> str:
        """Return the fields as text, with limited length and with quotes where needed.

        For example `peer=127.0.0.1:50100 reason="no answer"`.
        """
        return " ".join([f"{name}={_text(value)}" for name, value in self.fields.items()])


def kv(**fields: object) -> LogFields:
    """Return the last argument of a log call, see the module's docstring."""
    return LogFields(fields)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _bounded(str(value))
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


def _bounded(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + "..."


class _Utc(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class _Text(_Utc):
    def __init__(self, program: str) -> None:
        shown = program.replace("%", "%%")
        super().__init__(f"%(asctime)s %(levelname)s {shown} %(name)s: %(message)s")


class _Json(_Utc):
    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "program": self._program,
            "logger": record.name,
            "message": "",
        }
        arguments = record.args
        if isinstance(arguments, tuple):
            for argument in arguments:
                if isinstance(argument, LogFields):
                    line |= {_free(name): _json(value) for name, value in argument.fields.items()}
            arguments = tuple("" if isinstance(each, LogFields) else each for each in arguments)
        sentence = str(record.msg)
        line["message"] = (sentence % arguments if arguments else sentence).rstrip()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["exception"] = f"{type(error).__name__}: {error}"
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line).decode()
        except UnicodeEncodeError:  # a lone surrogate, such as in a file name
            return json.dumps(line)


def _free(name: str) -> str:
    """Return a field name that differs from those that every line has."""
    return f"{name}_" if name in _LINE else name


def _json(value: object) -> object:
    match value:
        case None | bool() | int():
            return value
        case float():
            return float(value)  # msgspec rejects numpy's floats
        case _:
            return _bounded(str(value))


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    log.critical("uncaught exception", exc_info=(kind, error, trace))


def _uncaught_in_thread(caught: threading.ExceptHookArgs) -> None:
    error = caught.exc_value
    if error is None or caught.exc_type is SystemExit:
        return
    name = caught.thread.name if caught.thread else "unknown"
    exc_info = (caught.exc_type, error, caught.exc_traceback)
    log.critical("uncaught exception in a thread %s", kv(thread=name), exc_info=exc_info)


def _unraisable(caught: "sys.UnraisableHookArgs") -> None:
    error = caught.exc_value
    if error is None:
        return
    where = caught.err_msg or "exception ignored in"
    exc_info = (caught.exc_type, error, caught.exc_traceback)
    log.error("%s %s", where, kv(object=repr(caught.object)), exc_info=exc_info)


class ThrottledLog:
    """A logger with a rate limit for each sentence at each level. For any thread.

    A sentence is one of few values, never text from clients.
    """

    def __init__(
        self,
        log: logging.Logger,
        *,
        most: int = 10,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            most: number of lines of one sentence per interval.
            interval_s: length in seconds of an interval, which begins with its first line.
        """
        self._log = log
        self._most = most
        self._interval_s = interval_s
        self._clock = clock
        self._intervals: dict[tuple[int, str], _Interval] = {}  # by level and sentence
        self._lock = threading.Lock()

    def info(self, sentence: str, **fields: object) -> None:
        self._write(logging.INFO, sentence, fields)

    def warning(self, sentence: str, **fields: object) -> None:
        self._write(logging.WARNING, sentence, fields)

    def error(
        self, sentence: str, *, exc_info: BaseException | None = None, **fields: object
    ) -> None:
        self._write(logging.ERROR, sentence, fields, exc_info)

    def _write(
        self,
        level: int,
        sentence: str,
        fields: Mapping[str, object],
        exc_info: BaseException | None = None,
    ) -> None:
        if not self._log.isEnabledFor(level):
            return
        more = self._allowed(level, sentence)
        if more is not None:
            self._log.log(level, f"{sentence} %s", kv(**fields, **more), exc_info=exc_info)

    def _allowed(self, level: int, sentence: str) -> Mapping[str, object] | None:
        """Return additional fields for the line, or None if it is suppressed."""
        with self._lock:
            now = self._clock()
            interval = self._intervals.get((level, sentence))
            more: dict[str, object] = {}
            if interval is None or now >= interval.end:
                left_out = max(0, interval.num_lines - self._most) if interval else 0
                if left_out:
                    more["left_out_before"] = left_out
                interval = self._intervals[level, sentence] = _Interval(now + self._interval_s)
            interval.num_lines += 1
            if interval.num_lines == self._most:
                more["more_left_out_for_s"] = round(interval.end - now, 1)
            return more if interval.num_lines <= self._most else None


@dataclass(slots=True)
class _Interval:
    end: float
    num_lines: int = 0  # written and suppressed lines
