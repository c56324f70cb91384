"""Kernels that Triton compiles in this process while it serves.

The rehearsal compiles all kernels that serving is known to launch. A missed kernel is compiled
during a step, which then takes seconds longer than any earlier step.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from common.distribution import HistogramCounts
from common.logs import kv

log = logging.getLogger(__name__)

_WORTH_A_WARNING_S = 1.0  # reading a kernel from Triton's cache takes milliseconds


class Compiles:
    """A counter of compilations. The compiling thread writes, any other thread may read."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._under_way: dict[int, float] = {}  # start time by thread
        self._num_ended = 0
        self._seconds = 0.0
        self.ended_at = float("-inf")  # time of the last end

    @property
    def began(self) -> float | None:
        """Start time of the oldest compilation in progress, or None."""
        return min(tuple(self._under_way.values()), default=None)

    def watch(self, runtime: Any) -> None:
        """Make Triton report compilations here from now on.

        Args:
            runtime: `triton.knobs.runtime`.
        """
        runtime.jit_cache_hook = self._begin
        runtime.jit_post_compile_hook = self._end

    def gauges(self) -> Mapping[str, float]:
        return {
            "total_kernels_compiled": float(self._num_ended),
            "total_kernel_compile_seconds": self._seconds,
        }

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {}

    def _begin(self, **_: Any) -> bool:
        """Note a start. Return False, so that Triton compiles."""
        self._under_way[threading.get_ident()] = self._now()
        return False

    def _end(self, *, fn: Any, **_: Any) -> None:
        now = self._now()
        seconds = now - self._under_way.pop(threading.get_ident(), now)
        self._num_ended += 1
        self._seconds += seconds
        self.ended_at = now
        if seconds >= _WORTH_A_WARNING_S:
            log.warning("kernel compiled while serving %s", kv(kernel=fn.name, seconds=seconds))
