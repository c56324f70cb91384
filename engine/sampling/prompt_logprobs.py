"""Log-probabilities of prompts: the logits of a whole chunk, a slice at a time.

They need logits of tokens that no row samples after, so they say of a step which tokens' hidden
states they want besides. A prompt that asks for them is computed whole, whatever the cache has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import ScheduleBatch
from engine.batch.request import Request
from engine.batch.table import RequestTable
from kernels.sampling.logprobs import logprobs

SLICE = 256  # tokens whose logits there is memory for


@dataclass(frozen=True, slots=True, eq=False)
class PromptWork:
    """Of one step.

    places: int64 [n], of tokens among the step's; what is wanted is how likely the prompt's next
    token is after each.
    rows: int64 [n], theirs; targets: int32 [n], those next tokens.
    """

    places: Tensor
    rows: Tensor
    targets: Tensor
    num_top: int

    def run(
        self, to_logits: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor
    ) -> Mapping[str, Tensor]:
        """On the forward stream.

        Args:
            hidden: [n, hidden], of the tokens at `places`.
            targets: on the device.
        """
        parts = [
            logprobs(to_logits(some).float(), wanted, self.num_top)
            for some, wanted in zip(
                torch.split(hidden, SLICE), torch.split(targets, SLICE), strict=True
            )
        ]
        chosen, top_tokens, top = (torch.cat(column) for column in zip(*parts, strict=True))
        return {"rows": self.rows, "chosen": chosen, "top_tokens": top_tokens, "top": top}


class PromptLogprobs:
    """Engine thread only."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._num_top = np.full(table.num_slots, -1, np.int32)

    def acquire(self, slot: int, request: Request) -> bool:
        """The request has got that slot. Returns whether its prompt's are wanted."""
        self._num_top[slot] = request.sampling.prompt_logprobs
        return request.sampling.prompt_logprobs >= 0

    def build(self, batch: ScheduleBatch) -> PromptWork | None:
        """None: none of the step's tokens has a next one in its prompt."""
        table, slots = self._table, batch.slots.astype(np.intp)
        last = np.minimum(batch.ends, table.num_prompt[slots] - 1)
        counts = np.where(self._num_top[slots] < 0, 0, np.maximum(last - batch.starts, 0))
        if not counts.any():
            return None
        rows = np.repeat(np.arange(len(slots)), counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        lengths = batch.ends - batch.starts
        firsts = np.cumsum(lengths) - lengths
        targets = table.tokens[slots[rows], batch.starts[rows] + offsets + 1]
        return PromptWork(
            torch.from_numpy((firsts[rows] + offsets).astype(np.int64)),
            torch.from_numpy(rows.astype(np.int64)),
            torch.from_numpy(targets),
            int(self._num_top[slots[counts > 0]].max()),
        )

    def rehearsal(self, num_tokens: int) -> PromptWork:
        """Of the first tokens of a step, a slice of them at most."""
        places = torch.arange(min(num_tokens, SLICE))
        return PromptWork(places, places, places.int(), 1)
