"""Drafts for decode rows: which rows of the next step have drafts, and the outcome of earlier ones.

A row with drafts computes several tokens, and continues after the last accepted draft. The next
step is launched before that is known, as if all drafts were accepted. Its rows may therefore be up
to `early` tokens ahead, and the device moves them back. Rejected drafts need no undo: their KV lies
after the request's tokens, and is overwritten before it is read.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common import bounds
from common.distribution import HistogramCounts, LiveHistogram
from common.requests.prediction import NOTHING, PredictionUsage
from engine.batch.batch import AcceptedRuns, ForwardMode, Ints, ScheduleBatch
from engine.batch.image_tokens import in_vocabulary
from engine.batch.request import Request
from engine.core import EngineCore
from engine.scheduler.running import RunningBatch
from engine.speculative.speculator import Speculator

_WITHOUT_PROMPTS = (ForwardMode.DECODE, ForwardMode.VERIFY)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Decode rows of a forward, by slot, those with more drafts first. drafts, early: None if all
    are 0."""

    slots: NDArray[np.intp]
    drafts: Ints | None = None
    early: Ints | None = None


class Speculation:
    """Speculative decoding of a scheduler. Engine thread only."""

    def __init__(self, speculator: Speculator, core: EngineCore, running: RunningBatch) -> None:
        self._drafter = speculator.drafter
        self._predictions = speculator.predictions
        self._policy = speculator.policy
        self._max_drafts = speculator.max_drafts
        self._table = core.table
        self._clock = core.clock
        self._running = running
        self._lengths = LiveHistogram(bounds.RUN_TOKENS)
        # Per launched step with drafts: slots whose drafts come from their prediction.
        self._unsettled: deque[set[int]] = deque()
        self._launches: deque[float] = deque()  # times of unfinished steps
        self._finished = 0.0
        self._num_drafted = 0
        self._num_accepted = 0
        self._predicted = NOTHING
        core.table.tell_of_requests(self._acquired)

    def counters(self) -> dict[str, int]:
        """Return the totals since the start."""
        return {
            "draft_tokens/accepted": self._num_accepted,
            "draft_tokens/rejected": self._num_drafted - self._num_accepted,
            "prediction_tokens/accepted": self._predicted.accepted,
            "prediction_tokens/rejected": self._predicted.rejected,
        }

    def distributions(self) -> dict[str, HistogramCounts]:
        return {"verified_tokens": self._lengths.counted()}

    # Before a step --------------------------------------------------------------------------------

    def rows(self, slots: NDArray[np.intp], *, verify: bool) -> DecodeRows:
        """Return the decode rows of the step that is launched next, with their drafts.

        Args:
            slots: decode rows, with pages for their next token.
            verify: whether they may have drafts.
        """
        self._launches.append(self._clock())
        foreseen: set[int] = set()
        drafts = self._drafts(slots, foreseen) if verify else None
        if drafts is not None:
            order = np.argsort(-drafts, kind="stable")
            slots, drafts = slots[order], drafts[order]
        early = self._early(slots) if self._unsettled else None
        if drafts is not None:
            self._unsettled.append(foreseen)
        return DecodeRows(slots, drafts, early)

    def _early(self, slots: NDArray[np.intp]) -> Ints | None:
        early = np.maximum(self._table.length[slots] - 1 - self._table.known[slots], 0)
        return early if np.count_nonzero(early) else None

    def _drafts(self, slots: NDArray[np.intp], foreseen: set[int]) -> Ints | None:
        """Write drafts to the request table. Return each row's number of drafts, or None if no row
        has any.

        Args:
            foreseen: receives the slots whose drafts come from their prediction.
        """
        table = self._table
        room = np.minimum(table.max_length[slots] - table.length[slots] - 1, self._max_drafts)
        able = np.flatnonzero(table.plain[slots] & (room > 0))
        if not len(able):
            return None
        limits = np.minimum(self._policy.limits(slots[able], len(slots)), room[able])
        drafts = np.zeros(len(slots), np.int32)
        left = table.num_slots - len(slots)  # at most one sample per slot of the table in one step
        for row, limit in zip(able.tolist(), limits.tolist(), strict=True):
            if limit > 0 and left > 0:
                drafts[row] = self._guess(int(slots[row]), min(limit, left), foreseen)
                left -= int(drafts[row])
        self._fit(slots, drafts)
        return drafts if np.count_nonzero(drafts) else None

    def _guess(self, slot: int, count: int, foreseen: set[int]) -> int:
        """Write guesses after the known tokens. Return how many of them are drafts of the next row.

        The guesses also cover the token indices of the step in flight. If its drafts are rejected,
        the next row moves back to those indices and uses the newer guesses as its drafts.
        """
        table = self._table
        known, length = int(table.known[slot]), int(table.length[slot])
        tokens, wanted = table.tokens[slot, :known], length - known + count
        proposed = self._predictions.propose(slot, tokens, wanted)
        if len(proposed):
            foreseen.add(slot)
        else:
            proposed = self._drafter.propose(tokens, wanted)
            if np.count_nonzero(of_images := ~in_vocabulary(proposed)):
                proposed = proposed[: of_images.argmax()]
        past = known + len(proposed)
        if past <= length:
            return 0
        table.tokens[slot, known:past] = proposed
        return past - length

    def _fit(self, slots: NDArray[np.intp], drafts: Ints) -> None:
        """Give rows the page that their drafts need, or remove the drafts. Drafts never cause a
        retraction."""
        table = self._table
        full = np.flatnonzero(table.length[slots] + drafts > table.capacity[slots])
        if len(full) and not self._running.grow(slots[full]):
            drafts[full] = table.capacity[slots[full]] - table.length[slots[full]]

    # After a step ---------------------------------------------------------------------------------

    def finish(
        self, batch: ScheduleBatch, runs: AcceptedRuns | None
    ) -> Sequence[tuple[tuple[int, int], PredictionUsage]]:
        """Record the outcome of a step. To be called before its tokens are given to its rows.
        Return the accepted and rejected tokens of predictions, by origin."""
        now, launched = self._clock(), self._launches.popleft()
        if batch.mode in _WITHOUT_PROMPTS and batch.swap_out is None and batch.swap_in is None:
            self._policy.took(batch.num_tokens, now - max(launched, self._finished))
        self._finished = now
        return () if runs is None else self._settle(batch, runs)

    def _settle(
        self, batch: ScheduleBatch, runs: AcceptedRuns
    ) -> Sequence[tuple[tuple[int, int], PredictionUsage]]:
        slots, drafted = batch.slots.astype(np.intp), batch.ends - batch.starts - 1
        accepted = runs.counts - 1
        foreseen = self._unsettled.popleft()
        live = self._table.live[slots]
        self._table.length[slots[live]] -= (drafted - accepted)[live]
        rows = drafted > 0
        self._policy.verified(slots[rows], drafted[rows], accepted[rows])
        self._num_drafted += int(drafted.sum())
        self._num_accepted += int(accepted.sum())
        self._lengths.add_all(runs.counts[rows].tolist())
        if not foreseen:
            return ()
        of_predictions = np.flatnonzero(rows & live & np.isin(slots, list(foreseen)))
        predicted = [
            (
                self._table.origin_of(int(slots[row])),
                PredictionUsage(int(accepted[row]), int(drafted[row] - accepted[row])),
            )
            for row in of_predictions.tolist()
        ]
        self._predicted = sum((each for _, each in predicted), self._predicted)
        return predicted

    def _acquired(self, slot: int, request: Request) -> None:
        self._policy.acquired(slot)
        self._predictions.acquired(slot, request)
