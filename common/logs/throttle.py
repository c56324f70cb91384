"""Rate limit for log lines that unauthenticated callers can cause, by kind of line.

Suppressed lines are counted. The last line of a full interval says that more are suppressed, and
the first one after it says how many. For lines about Baton's own processes, use `logging`.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from common.logs import kv


class Throttle:
    """Limits lines by kind. For any thread."""

    def __init__(
        self,
        most: int = 10,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a limit.

        Args:
            most: lines of one kind per interval.
            interval_s: length of an interval, which begins with its first line.
            clock: returns seconds.
        """
        self._most = most
        self._interval_s = interval_s
        self._clock = clock
        self._intervals: dict[str, _Interval] = {}
        self._lock = threading.Lock()

    def allowed(self, kind: str) -> Mapping[str, object] | None:
        """Return additional fields for the line, or None if it is suppressed.

        Args:
            kind: one of few, such as the sentence of the line. Never text from clients.
        """
        with self._lock:
            now = self._clock()
            interval = self._intervals.get(kind)
            more: dict[str, object] = {}
            if interval is None or now >= interval.end:
                left_out = max(0, interval.num_lines - self._most) if interval else 0
                if left_out:
                    more["left_out_before"] = left_out
                interval = self._intervals[kind] = _Interval(now + self._interval_s)
            interval.num_lines += 1
            if interval.num_lines == self._most:
                more["more_left_out_for_s"] = round(interval.end - now, 1)
            return more if interval.num_lines <= self._most else None


class ThrottledLog:
    """A logger with a rate limit for each sentence at each level."""

    def __init__(self, log: logging.Logger, throttle: Throttle) -> None:
        self._log = log
        self._throttle = throttle

    def info(self, sentence: str, **fields: object) -> None:
        self._write(logging.INFO, sentence, fields)

    def warning(self, sentence: str, **fields: object) -> None:
        self._write(logging.WARNING, sentence, fields)

    def error(
        self, sentence: str, *, exc_info: BaseException | None = None, **fields: object
    ) -> None:
        """Log an error, with the traceback of `exc_info`."""
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
        more = self._throttle.allowed(f"{level} {sentence}")
        if more is not None:
            self._log.log(level, f"{sentence} %s", kv(**fields, **more), exc_info=exc_info)


class _Interval:
    __slots__ = ("end", "num_lines")

    def __init__(self, end: float) -> None:
        self.end = end
        self.num_lines = 0  # written and suppressed
