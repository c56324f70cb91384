"""Decode rows with their drafts, and the assembly of all rows into a ScheduleBatch.

A row with drafts computes several tokens, and continues after the last accepted draft. The
scheduler launches the next step before it knows how many drafts were accepted, as if all were. The
rows of that step may therefore be up to `early` tokens ahead, and the device moves them back.
Rejected drafts need no undo: their KV lies after the request's tokens, and is overwritten before it
is read.

`LaunchedSteps` has the steps that are launched and not finished. They hold the pages that a request
releases while a step still writes them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from common import distribution
from common.distribution import HistogramCounts, LiveHistogram
from common.errors import EngineFault
from common.request import NOT_PREDICTED, PredictionUsage
from engine.batch.batch import (
    TO_GUESS,
    AcceptedRuns,
    ForwardMode,
    Ints,
    LayerGroup,
    ScheduleBatch,
    StateCheckpoint,
)
from engine.batch.holding import ONE
from engine.batch.image_tokens import in_vocabulary
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.core import EngineCore
from engine.grammar.matching import Match
from engine.kv_cache.pages import PageAllocator, PageHolder, Pages
from engine.kv_cache.radix_nodes import NO_STATE
from engine.scheduler.admission import ExtendRow
from engine.scheduler.retraction import HostSwaps
from engine.scheduler.running import NO_SLOTS, RunningBatch
from engine.speculative import NOTHING, Speculator

_WITHOUT_PROMPTS = (ForwardMode.DECODE, ForwardMode.VERIFY)
_NO_CHECKPOINTS: tuple[StateCheckpoint, ...] = ()


class DecodeRows(msgspec.Struct, frozen=True, eq=False):
    """The decode rows of a forward, by slot. Rows with more drafts come first.

    drafts, early: [num_rows]. None if all are 0.
    """

    slots: NDArray[np.intp]
    drafts: Ints | None = None
    early: Ints | None = None


class Speculation:
    """The drafts of decode rows, and the acceptance of drafts. Engine thread only."""

    def __init__(self, speculator: Speculator, core: EngineCore, running: RunningBatch) -> None:
        self._drafter = speculator.drafter
        self._predictions = speculator.predictions
        self._policy = speculator.policy
        self._max_drafts = speculator.max_drafts
        self._table = core.table
        self._clock = core.clock
        self._running = running
        self._matches: dict[int, Match] = {}  # grammar states, by slot
        self._lengths = LiveHistogram(distribution.RUN_TOKENS)
        # One entry per launched step with drafts: slots whose drafts are from a client's
        # prediction.
        self._unsettled: deque[set[int]] = deque()
        self._launches: deque[float] = deque()  # launch times of unfinished steps
        self._finished = 0.0
        self._num_drafted = 0
        self._num_accepted = 0
        self._predicted = NOT_PREDICTED
        core.table.add_listener(self._acquired)

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

    # Before a step.

    def rows(self, slots: NDArray[np.intp], *, verify: bool) -> DecodeRows:
        """Return the decode rows of the step that is launched next, with their drafts.

        Args:
            slots: slots of the rows. Their requests have pages for the next token.
            verify: whether the rows may have drafts.
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
        """Write drafts to the slot table. Return the number of drafts per row, or None if no row
        has any. Adds slots with drafts from a client's prediction to `foreseen`."""
        table = self._table
        room = np.minimum(table.max_length[slots] - table.length[slots] - 1, self._max_drafts)
        able = np.flatnonzero(room > 0)
        if not len(able):
            return None
        limits = np.minimum(self._policy.limits(slots[able], len(slots)), room[able])
        drafts = np.zeros(len(slots), np.int32)
        left = table.num_slots - len(slots)  # a step has at most one sample per slot of the table
        guided: list[tuple[int, Match]] = []
        for row, limit in zip(able.tolist(), limits.tolist(), strict=True):
            if limit > 0 and left > 0:
                slot, count = int(slots[row]), min(limit, left)
                match = self._matches.get(slot)
                if match is None:
                    drafts[row] = self._write(slot, self._guess(slot, count, foreseen))
                elif not (match.busy or match.fault or match.compiled.slow):
                    drafts[row] = min(count, match.max_drafts)  # an upper limit
                    guided.append((row, match))
                left -= int(drafts[row])
        if guided:
            self._guess_by_grammar(slots, drafts, guided, foreseen)
        self._fit(slots, drafts)
        return drafts if np.count_nonzero(drafts) else None

    def _guess_by_grammar(
        self,
        slots: NDArray[np.intp],
        drafts: Ints,
        guided: Sequence[tuple[int, Match]],
        foreseen: set[int],
    ) -> None:
        """Write drafts that the grammars allow, or tokens that they force. `drafts`: maximum number
        per row, replaced by the actual number."""
        table, asked = self._table, list[tuple[int, Match, Ints]]()
        for row, match in guided:
            slot, count = int(slots[row]), int(drafts[row])
            guesses = self._guess(slot, count, foreseen) if count else NOTHING
            if len(guesses) and guesses[0] == TO_GUESS:
                drafts[row] = self._write(slot, guesses)
                continue
            drafts[row] = 0
            if count:
                room = int(table.length[slot] - table.known[slot]) + count
                match.ask(table.unfollowed(slot, match.num_followed), guesses.tolist(), room)
                asked.append((row, match, guesses))
        driven = [match for _, match, _ in asked if not match.continued]
        if driven:
            driven[0].threads.drive(driven)
        for row, match, guesses in asked:
            if not (match.busy or match.fault):
                slot, path = int(slots[row]), np.array(match.continuation, np.int32)
                drafts[row] = self._write(slot, path)
                num_common = min(len(path), len(guesses))
                if not np.array_equal(path[:num_common], guesses[:num_common]):
                    foreseen.discard(slot)  # these drafts are not from its prediction

    def _guess(self, slot: int, count: int, foreseen: set[int]) -> Ints:
        """Return guesses after the known tokens, of which `count` may be drafts of the next row.

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
        return proposed

    def _write(self, slot: int, guesses: Ints) -> int:
        """Write guesses after the known tokens. Return how many of them are drafts of the next
        row."""
        known, length = int(self._table.known[slot]), int(self._table.length[slot])
        past = known + len(guesses)
        if past <= length:
            return 0
        self._table.tokens[slot, known:past] = guesses
        return past - length

    def _fit(self, slots: NDArray[np.intp], drafts: Ints) -> None:
        """Allocate the pages that drafts need, or remove the drafts. Drafts never cause a
        retraction."""
        table = self._table
        full = np.flatnonzero(table.length[slots] + drafts > table.capacity[slots])
        if len(full) and not self._running.grow(slots[full]):
            drafts[full] = table.capacity[slots[full]] - table.length[slots[full]]

    # After a step.

    def finish(
        self, batch: ScheduleBatch, runs: AcceptedRuns | None
    ) -> Sequence[tuple[tuple[int, int], PredictionUsage]]:
        """Record which drafts of a step were accepted. Call it before the tokens are appended to
        the rows.

        Returns:
            The numbers of accepted and rejected tokens of clients' predictions, by origin.
        """
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
        self._matches.pop(slot, None)
        if request.match is not None:
            self._matches[slot] = request.match


class ScheduledStep(msgspec.Struct, frozen=True, eq=False):
    """One scheduling decision. From launch to result it holds its slots and the pages of `held`.

    Attributes:
        extends: the first rows.
        slots: slots of the batch.
        released: pages that the forward may write although their requests have released them, in
            arrays of distinct pages. See LaunchedSteps.
    """

    batch: ScheduleBatch
    extends: Sequence[ExtendRow]
    slots: NDArray[np.intp]
    swaps: HostSwaps
    released: list[Pages] = msgspec.field(default_factory=list)

    def held(self) -> list[Pages]:
        """Return the pages that the step holds. Each page of each array has one hold. The pages of
        one array are distinct."""
        held = [*self.released, *self.swaps.saved]
        if self.swaps.swap_in is not None:
            held.append(self.swaps.swap_in.device_pages)
        for row in self.extends:
            held += row.states
        return held


class LaunchedSteps:
    """The launched steps that are not finished, in the order of their launch.

    A request holds its pages while a step writes them. If it releases them earlier, the step holds
    the pages that it writes. Engine thread only.

    Attributes:
        split: the forward that is between two groups of its layers, until its last group is
            launched. None: there is no such forward.
    """

    def __init__(self, table: SlotTable, pages: PageAllocator) -> None:
        self._table = table
        self._pages = pages
        self._steps: deque[ScheduledStep] = deque()
        self.split: ScheduledStep | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[ScheduledStep]:
        yield from self._steps
        if self.split is not None:
            yield self.split

    def append(self, step: ScheduledStep) -> None:
        self._steps.append(step)

    def take(self, batch: ScheduleBatch) -> ScheduledStep:
        """Remove and return the oldest step. Raises EngineFault if `batch` is not its batch."""
        if not self._steps or self._steps[0].batch is not batch:
            raise EngineFault(f"step {batch.step} is finished out of order")
        return self._steps.popleft()

    def hold_written(self, slot: int) -> None:
        """Hold the pages that these steps write for the request in `slot`, which is about to
        release them."""
        for step, start, end in self._rows(slot):
            first, past = start // self._table.page_size, self._table.tables.num_pages(end)
            pages = self._table.page_table[slot, :, first:past].flatten()
            pages = np.concatenate((pages, self._table.state[slot]))
            written = pages[pages >= 0]  # a retracted request has released them before
            self._pages.hold(written, PageHolder.STEP)
            step.released.append(written)

    def compute(self, slot: int, num_tokens: int) -> bool:
        """Return whether these steps compute one of the first tokens of the request in `slot`."""
        return any(start < num_tokens for _, start, _ in self._rows(slot))

    def _rows(self, slot: int) -> Iterator[tuple[ScheduledStep, int, int]]:
        """Yield the steps with this slot, and the token indices [start, end) that they compute,
        wherever the row begins."""
        for step in self if self._table.in_flight(slot) else ():
            batch = step.batch
            for row in (step.slots == slot).nonzero()[0].tolist():
                early = 0 if batch.early is None else batch.early[row]
                yield step, int(batch.starts[row] - early), int(batch.ends[row])


class StepAssembler:
    """Builds and numbers the steps. It does not modify the slot table."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._all = np.ones(table.num_slots, np.bool_)
        self._all.flags.writeable = False  # shared by all batches
        # Rows of the previous step, in both index types.
        self._slots = NO_SLOTS
        self._slots_in_batch = np.empty(0, np.int32)
        # A slot is in flight if its step number is above `finished_step`. The numbers therefore
        # continue from the previous scheduler that used this table.
        self.num_steps = table.finished_step

    def assemble(
        self,
        extends: Sequence[ExtendRow],
        rows: DecodeRows,
        swaps: HostSwaps,
    ) -> ScheduledStep:
        """Build a step: prompt rows first, then decode rows."""
        slots, early = rows.slots, rows.early
        ends = self._table.length[slots]
        starts = ends - ONE
        if rows.drafts is not None:
            ends = ends + rows.drafts
        samples = self._all[: len(slots)]
        mode = ForwardMode.DECODE if rows.drafts is None else ForwardMode.VERIFY
        resumed = kept = _NO_CHECKPOINTS
        if extends:
            mode = ForwardMode.MIXED if len(slots) else ForwardMode.EXTEND
            slots = _before([row.slot for row in extends], slots)
            starts = _before([row.start for row in extends], starts)
            ends = _before([row.end for row in extends], ends)
            samples = _before([row.samples for row in extends], samples)
            if early is not None:
                early = _before([0] * len(extends), early)
            if self._table.tables.state_pages:
                resumed, kept = _checkpoints(extends)
        self.num_steps += 1
        batch = ScheduleBatch(
            self.num_steps,
            mode,
            self._in_batch(slots),
            starts,
            ends,
            samples,
            swaps.swap_out,
            swaps.swap_in,
            resumed,
            kept,
            early,
        )
        return ScheduledStep(batch, extends, slots, swaps)

    def _in_batch(self, slots: NDArray[np.intp]) -> Ints:
        """Return the slots in the type of a batch. Decode steps often have the same array."""
        if slots is not self._slots:
            self._slots, self._slots_in_batch = slots, slots.astype(np.int32)
        return self._slots_in_batch

    def group(self, forward: ScheduledStep, layers: LayerGroup, swaps: HostSwaps) -> ScheduledStep:
        """Build the step of one group of layers of a split prefill.

        The first group has the step number of the forward. The last group has its rows and holds.
        The other groups have no rows.
        """
        if layers.first:
            self.num_steps += 1
        batch = replace(
            forward.batch,
            step=self.num_steps,
            mode=ForwardMode.SPLIT,
            swap_out=swaps.swap_out,
            swap_in=swaps.swap_in,
            layers=layers,
        )
        if layers.is_last:
            return replace(forward, batch=batch, swaps=swaps)
        if layers.drops:
            return _without_tokens(forward, batch, swaps)
        return ScheduledStep(batch, (), NO_SLOTS, swaps)


def _before(values: Sequence[int], decodes: NDArray[Any]) -> NDArray[Any]:
    """Return a column of prompt rows, followed by the values of decode rows."""
    prompts = np.array(values, decodes.dtype)
    return np.concatenate((prompts, decodes)) if len(decodes) else prompts


def _checkpoints(
    extends: Sequence[ExtendRow],
) -> tuple[tuple[StateCheckpoint, ...], tuple[StateCheckpoint, ...]]:
    """Return the states from which prompt rows continue, and those that they keep."""
    resumed = tuple(
        StateCheckpoint(place, 0, row.resumed)
        for place, row in enumerate(extends)
        if len(row.resumed)
    )
    kept = tuple(
        StateCheckpoint(place, row.keep - row.start, row.kept)
        for place, row in enumerate(extends)
        if len(row.kept)
    )
    return resumed, kept


def _without_tokens(
    forward: ScheduledStep, batch: ScheduleBatch, swaps: HostSwaps
) -> ScheduledStep:
    """Return the step that ends a split prefill early. Its rows have no tokens. It holds what the
    forward holds. All requests of the forward have ended or are to end, so none of them later
    releases pages that an earlier group still writes."""
    kept = [row.kept for row in forward.extends if len(row.kept)]
    rows = [
        replace(row, end=row.start, last=False, kept=NO_STATE, keep=0) for row in forward.extends
    ]
    none = np.zeros(len(rows), np.bool_)
    batch = replace(batch, ends=batch.starts, samples=none, resumed=(), kept=())
    return ScheduledStep(batch, rows, forward.slots, swaps, [*forward.released, *kept])
