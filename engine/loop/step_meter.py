"""Metrics of step sizes, step durations, and the engine thread's waiting time.

Engine thread only. Nothing is counted per token. Decode steps are counted in groups, because
counting them one by one would cost about 3 % of a small batch's step.
"""

from common import bounds
from common.distribution import HistogramCounts, LiveHistogram
from engine.batch.batch import ForwardMode

_UNCOUNTED = 256  # maximum number of steps per group


class _Mode:
    """The metrics of one forward mode."""

    __slots__ = ("requests", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = LiveHistogram(bounds.STEP_S)
        self.requests = LiveHistogram(bounds.BATCH_REQUESTS)
        self.tokens = LiveHistogram(bounds.BATCH_TOKENS)


class StepMeter:
    """The metrics of all steps.

    Attributes:
        waited_s: total time spent waiting for results.
    """

    def __init__(self) -> None:
        self._modes = [_Mode() for _ in range(max(ForwardMode) + 1)]  # indexed by mode
        self._decode_requests: list[int] = []  # of steps not counted yet
        self._decode_seconds: list[float] = []
        self.waited_s = 0.0

    def decoded(self, num_requests: int, seconds: float) -> None:
        """Record a step of mode DECODE, with one token per request."""
        self._decode_requests.append(num_requests)
        self._decode_seconds.append(seconds)
        if len(self._decode_seconds) >= _UNCOUNTED:
            self._count_decodes()

    def computed(
        self, mode: ForwardMode, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """Record a step of another mode: with prompts, or with drafts."""
        of_mode = self._modes[mode]
        of_mode.seconds.add(seconds)
        of_mode.requests.add(num_requests)
        of_mode.tokens.add(num_tokens)

    def gauges(self) -> dict[str, float]:
        return {
            "total_waited/device": self.waited_s,
        }

    def distributions(self) -> dict[str, HistogramCounts]:
        self._count_decodes()
        counted: dict[str, HistogramCounts] = {}
        for mode in ForwardMode:
            of_mode, name = self._modes[mode], mode.name.lower()
            counted[f"step_seconds/{name}"] = of_mode.seconds.counted()
            counted[f"batch_requests/{name}"] = of_mode.requests.counted()
            if mode is not ForwardMode.DECODE:
                counted[f"batch_tokens/{name}"] = of_mode.tokens.counted()
        return counted

    def _count_decodes(self) -> None:
        decode = self._modes[ForwardMode.DECODE]
        decode.requests.add_all(self._decode_requests)
        decode.seconds.add_all(self._decode_seconds)
        self._decode_requests.clear()
        self._decode_seconds.clear()
