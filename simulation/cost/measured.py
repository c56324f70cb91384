"""Step times from a file of `baton bench steps`.

Each mode has a curve over tokens at the smallest context, and a slope for longer contexts:
attention takes time in proportion to the pairs of a new token and a cached token.
"""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from simulation.cost.models import StepShape

MAX_BYTES = 1 << 20  # size limit of a file
BAND = 0.2  # expected error between two runs on one machine, with other rows and contexts


MODES = ("prefill", "decode")


class MeasuredStep(msgspec.Struct, frozen=True):
    """A measured step.

    Attributes:
        mode: prefill: one row. decode: one token in each row.
        tokens: number of tokens that the step computes, in all rows.
        context: KV tokens of each row after the step.
    """

    mode: Literal["prefill", "decode"]
    tokens: int
    rows: int
    context: int
    seconds: float

    @property
    def cached_pairs(self) -> int:
        """Return the number of pairs of a new token and a token cached before the step."""
        return self.tokens * (self.context - self.tokens // self.rows)


class StepTable(msgspec.Struct, frozen=True):
    """The content of a file of `baton bench steps`.

    Attributes:
        model: last part of the model's path or hub id.
        machine: processor or GPU, for display.
        weight_bytes, kv_bytes_per_token, kv_capacity_tokens, vocabulary, context_length: see
            StepCost.
    """

    model: str
    machine: str
    weight_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    vocabulary: int
    context_length: int
    steps: tuple[MeasuredStep, ...]

    @classmethod
    def read(cls, file: Path) -> "StepTable":
        """Read a file.

        Raises:
            ValueError: the file is not from `baton bench steps`, or its numbers are impossible.
        """
        try:
            if file.stat().st_size > MAX_BYTES:
                raise ValueError(f"larger than {MAX_BYTES} bytes")
            table = msgspec.json.decode(file.read_bytes(), type=cls)
            sizes = (table.kv_bytes_per_token, table.kv_capacity_tokens, table.context_length)
            if min(*sizes, table.vocabulary, table.weight_bytes) < 1:
                raise ValueError("all sizes must be at least 1")
            for step in table.steps:
                if not (0 < step.rows <= step.tokens and 0 < step.seconds < 1e4):
                    raise ValueError(f"{step} is impossible")
            for mode in MODES:
                if len({step.tokens for step in table.steps if step.mode == mode}) < 2:
                    raise ValueError(f"fewer than two sizes of {mode} steps")
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{file}: {error}") from None
        return table


class MeasuredTimes:
    """Step times by interpolation in a StepTable."""

    def __init__(self, table: StepTable) -> None:
        self._prefill = _Curve(table, "prefill")
        self._decode = _Curve(table, "decode")
        self._least = min(self._prefill.least, self._decode.least)

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds of a step.

        Prompts and decode rows share the time of the smallest step, in which the weights are read.
        """
        rows, pairs, extra = 0, 0, 0.0
        for new, context in zip(shape.new_tokens, shape.contexts, strict=True):
            if new == 1:
                rows += 1
                pairs += context - 1
            else:
                extra += self._prefill.seconds(new, new * (context - new)) - self._least
        if rows:
            extra += self._decode.seconds(rows, pairs) - self._least
        return self._least + max(0.0, extra)


class _Curve:
    """The step times of one mode.

    Attributes:
        least: shortest measured step in seconds.
    """

    def __init__(self, table: StepTable, mode: str) -> None:
        steps = sorted(
            (step for step in table.steps if step.mode == mode),
            key=lambda step: (step.tokens, step.context),
        )
        first = {step.tokens: step for step in reversed(steps)}
        self._firsts = [first[tokens] for tokens in sorted(first)]
        self._tokens = [step.tokens for step in self._firsts]
        self.least = min(step.seconds for step in steps)
        longer = [(step, first[step.tokens]) for step in steps if step is not first[step.tokens]]
        self._pair_s = _slope(
            [step.cached_pairs - short.cached_pairs for step, short in longer],
            [step.seconds - short.seconds for step, short in longer],
        )

    def seconds(self, tokens: int, cached_pairs: int) -> float:
        """Return the seconds of a step. Beyond the curve, its last segment is extrapolated."""
        place = min(max(1, bisect_right(self._tokens, tokens)), len(self._tokens) - 1)
        below, above = self._firsts[place - 1], self._firsts[place]
        share = (tokens - below.tokens) / (above.tokens - below.tokens)
        seconds = (1 - share) * below.seconds + share * above.seconds
        measured = (1 - share) * below.cached_pairs + share * above.cached_pairs
        return max(self.least, seconds + self._pair_s * (cached_pairs - measured))


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the best line through the origin, at least 0."""
    squares = sum(each * each for each in x)
    return max(0.0, sum(a * b for a, b in zip(x, y, strict=True)) / squares) if squares else 0.0
