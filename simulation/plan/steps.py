"""The step times that closed forms need, each computed once per node size."""

import math
from collections.abc import Callable, Sequence
from functools import cache

from simulation.cost import StepCost, StepShape
from simulation.plan.traffic import Traffic

CHUNK = 8192  # tokens of a chunk on prefill nodes, the default
MAX_BATCH_TOKENS = 16384  # of the prompts in one step, the default
MAX_ROWS = 1024


class NodeSteps:
    """Step times of one kind of node for the lengths of a load.

    Attributes:
        prompts: seconds of each request's prompt on an idle prefill node.
        kv_rows: running requests that the KV pool holds.
        max_batch: prompts that share a step on a prefill node.
        batch_s: seconds of a step with a number of mean prompts.
    """

    def __init__(self, cost: StepCost, traffic: Traffic) -> None:
        self.cost = cost
        self._context = round(traffic.context)
        self._input = max(1, round(traffic.input))
        self.kv_rows = cost.kv_capacity_tokens / traffic.context
        self.prompts = [self._prompt_s(each.input) for each in traffic.requests]
        self.max_batch = max(1, MAX_BATCH_TOKENS // self._input)
        self.batch_s = cache(self._batch_s)
        self._decode_at, self._mixed_at = cache(self._decode_s), cache(self._mixed_s)

    def batch_between(self, prompts: float) -> float:
        """Return `batch_s` for a mean number of prompts, interpolated."""
        return _between(self.batch_s, prompts)

    def decode_s(self, rows: float) -> float:
        """Return the seconds of a step of `rows` decode rows, interpolated."""
        return _between(self._decode_at, rows)

    def mixed_s(self, chunk: int, rows: float) -> float:
        """Return the seconds of a step of a chunk of prompts beside `rows` decode rows."""
        return _between(lambda number: self._mixed_at(chunk, number), rows)

    def _decode_s(self, rows: int) -> float:
        rows = max(1, rows)
        return self.cost.step_s(StepShape((1,) * rows, (self._context,) * rows))

    def _mixed_s(self, chunk: int, rows: int) -> float:
        """A chunk is the middle one of a long prompt, or consists of several short prompts."""
        length = self._input
        if length >= chunk:
            chunks: Sequence[int] = (chunk,)
            contexts: Sequence[int] = ((length + chunk) // 2,)
        else:
            whole, rest = divmod(chunk, length)
            chunks = contexts = (length,) * whole + ((rest,) if rest else ())
        return self.cost.step_s(
            StepShape((1,) * rows + tuple(chunks), (self._context,) * rows + tuple(contexts))
        )

    def _prompt_s(self, length: int) -> float:
        ends = [*range(CHUNK, length, CHUNK), length]
        starts = [0, *ends[:-1]]
        return sum(
            self.cost.step_s(StepShape((end - start,), (end,)))
            for start, end in zip(starts, ends, strict=True)
        )

    def _batch_s(self, prompts: int) -> float:
        """Return the seconds of a step of several mean prompts."""
        if prompts == 1:
            return self._prompt_s(self._input)
        return self.cost.step_s(StepShape((self._input,) * prompts, (self._input,) * prompts))


def _between(at: Callable[[int], float], place: float) -> float:
    below = math.floor(place)
    share = place - below
    return at(below) if share == 0 else (1 - share) * at(below) + share * at(below + 1)
