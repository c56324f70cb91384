"""How large steps are and how long they take, and how long the engine thread waits for them.

Engine thread only; nothing is counted per token. Decode steps are counted many at a time: one by
one they would cost a small batch's step some 3 %.
"""

from common import bounds
from common.distribution import Counted, Distribution
from engine.batch.batch import ForwardMode

_UNCOUNTED = 256  # steps at the most


class _Mode:
    """The steps of one forward mode."""

    __slots__ = ("requests", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = Distribution(bounds.STEP_S)
        self.requests = Distribution(bounds.BATCH_REQUESTS)
        self.tokens = Distribution(bounds.BATCH_TOKENS)


class StepMeter:
    """
    Attributes:
        waited_s: for results, in sum.
    """

    def __init__(self) -> None:
        self._modes = [_Mode() for _ in range(max(ForwardMode) + 1)]  # a mode is an index
        self._decode_requests: list[int] = []  # of steps that are not counted yet
        self._decode_seconds: list[float] = []
        self.waited_s = 0.0

    def decoded(self, num_requests: int, seconds: float) -> None:
        """A step of mode DECODE: a token each."""
        self._decode_requests.append(num_requests)
        self._decode_seconds.append(seconds)
        if len(self._decode_seconds) >= _UNCOUNTED:
            self._count_decodes()

    def computed(
        self, mode: ForwardMode, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """A step of another mode: with prompts, or with drafts."""
        of_mode = self._modes[mode]
        of_mode.seconds.add(seconds)
        of_mode.requests.add(num_requests)
        of_mode.tokens.add(num_tokens)

    def gauges(self) -> dict[str, float]:
        return {
            "total_waited/device": self.waited_s,
        }

    def distributions(self) -> dict[str, Counted]:
        self._count_decodes()
        counted: dict[str, Counted] = {}
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
