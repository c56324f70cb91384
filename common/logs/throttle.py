"""Log lines that strangers can cause, at most so many of a kind in an interval.

What is left out is counted: the last line of a full interval says that more of its kind are left
out, the first one after it how many were. For what our own programs do, `logging` itself is right.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from common.logs import kv


class Throttle:
    """Which lines are written. For any thread."""

    def __init__(
        self,
        most: int = 10,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            most: lines of one kind in an interval, which begins with the first of them.
        """
        self._most = most
        self._interval_s = interval_s
        self._clock = clock
        self._intervals: dict[str, _Interval] = {}
        self._lock = threading.Lock()

    def allowed(self, kind: str) -> Mapping[str, object] | None:
        """Fields that the line must have besides its own; None: it is left out.

        Args:
            kind: one of few, such as the sentence of the line; never what a client sent.
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
    """A logger whose lines are throttled, each sentence at each level a kind of its own."""

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
        """With the traceback of `exc_info`."""
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
        self.num_lines = 0  # asked for, written or not
