"""Split prefill: compute the layers of a prompt in groups, with a decode step between two groups.

    chunk chosen --first group--> between groups --last group--> finished like any step
                                       |  ^  |
                               next group +  +--all its requests end--> dropped

A running request therefore waits for one group of layers instead of the whole chunk. The size of a
group follows from the measured time per prompt token and layer. If even one layer of a chunk takes
longer than the limit, the chunk gets fewer tokens. A chunk is not split while no request runs.

The slots and pages of the forward are held from the first group to the last one, as if it were one
step. Requests that end meanwhile wait for the end of their forward. A paused scheduler launches the
remaining layers, so that no forward is between groups once it is at rest.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from engine.batch.batch import LayerGroup
from engine.batch.table import SlotTable
from engine.scheduler.admission import PrefillAdmission
from engine.scheduler.assembly import DecodeRows, LaunchedSteps, ScheduledStep, StepAssembler
from engine.scheduler.next_rows import KeptCapacity, RowSelector, SelectedRows, StepKind
from engine.scheduler.retraction import HostSwaps
from engine.scheduler.running import RunningBatch
from engine.scheduler.slot_owners import SlotOwners

_NO_SLOTS = np.empty(0, np.intp)
_NO_SWAPS = HostSwaps()
_UNKNOWN_STEP = np.iinfo(np.int64).max  # number of the forward's last step, which is not known yet


class SplitForwardState:
    """The forward that is between two groups of its layers, at most one. Engine thread only.

    Attributes:
        next_layer: first layer of its next group.
    """

    def __init__(
        self,
        table: SlotTable,
        owners: SlotOwners,
        assembler: StepAssembler,
        launched: LaunchedSteps,
    ) -> None:
        self._table = table
        self._owners = owners
        self._assembler = assembler
        self._launched = launched
        self.next_layer = 0

    @property
    def forwards(self) -> tuple[ScheduledStep, ...]:
        """Return the forward, until its last group is launched."""
        return self._launched.split

    @property
    def num_tokens(self) -> int:
        return sum(forward.batch.num_tokens for forward in self.forwards)

    @property
    def ends(self) -> bool:
        """Return whether all requests of the forward have ended or are to end."""
        return all(
            row.request.to_finish is not None or row.request.slot != row.slot
            for step in self.forwards
            for row in step.extends
        )

    def step(self, rows: SelectedRows, swaps: HostSwaps) -> ScheduledStep:
        """Return the step of one group of layers."""
        layers = rows.layers
        assert layers is not None
        if not layers.first:
            self._launched.split = (self._begun(rows),)
        (forward,) = self.forwards
        self.next_layer = layers.past
        if layers.is_last or layers.drops:
            self._launched.split = ()
        return self._assembler.group(forward, layers, swaps)

    def _begun(self, rows: SelectedRows) -> ScheduledStep:
        forward = self._assembler.assemble(rows.extends, DecodeRows(rows.decodes), _NO_SWAPS)
        self._table.hold(forward.slots, _UNKNOWN_STEP)
        for row in rows.extends:
            self._owners.record(row.slot, row.request)
        return forward


class SplitSelector:
    """Chooses the rows and layers of each step. Engine thread only.

    Args:
        rows: the selector for whole forwards, without decode rows beside prompts.
        limit_s: maximum time of a group, in seconds.
        token_s: returns the seconds per prompt token through all layers. None: not measured yet.
    """

    def __init__(
        self,
        rows: RowSelector,
        state: SplitForwardState,
        *,
        admission: PrefillAdmission,
        running: RunningBatch,
        kept: KeptCapacity,
        limit_s: float,
        num_layers: int,
        token_s: Callable[[], float | None],
    ) -> None:
        self._rows = rows
        self._state = state
        self._admission = admission
        self._running = running
        self._kept = kept
        self._limit_s = limit_s
        self._num_layers = num_layers
        self._token_s = token_s
        self._decodes_next = False

    @property
    def reserved_pages(self) -> int:
        growth = sum(
            self._admission.growth_pages(row.request)
            for forward in self._state.forwards
            for row in forward.extends
            if row.samples
        )
        return self._rows.reserved_pages + growth

    def kinds_to_try(self) -> Sequence[StepKind]:
        """See RowSelector. Quarantined requests wait while a forward is between its groups."""
        return (StepKind.SHARED,) if self._state.forwards else self._rows.kinds_to_try()

    def choose(self, kind: StepKind) -> SelectedRows | None:
        """See RowSelector. After each step with prompts, decode rows are next."""
        self._admission.max_chunk_tokens = self._max_chunk_tokens()
        if kind is StepKind.QUARANTINED:
            return self._rows.choose(kind)
        if self._decodes_next and (rows := self._rows.choose_decodes()) is not None:
            self._decodes_next = False
            return rows
        rows = self.choose_group() if self._state.forwards else self._rows.choose(kind)
        if rows is not None and (rows.extends or rows.layers is not None):
            self._decodes_next = True
            if rows.extends:
                return rows._replace(layers=self._first_group(rows))
        return rows

    def choose_group(self) -> SelectedRows:
        """Return the next group of the forward that is between its groups."""
        first, total = self._state.next_layer, self._num_layers
        if self._state.ends:
            past = first
        else:
            past = min(first + self._group_size(self._state.num_tokens), total)
        return SelectedRows((), _NO_SLOTS, LayerGroup(first, past, total))

    def choose_rest(self) -> SelectedRows:
        """Return all remaining layers of the forward that is between its groups."""
        group = self.choose_group()
        layers = group.layers
        assert layers is not None
        return group if layers.drops else group._replace(layers=layers._replace(past=layers.total))

    def _first_group(self, rows: SelectedRows) -> LayerGroup | None:
        """Return the first group of layers. None: all layers."""
        num_layers = self._group_size(sum(row.end - row.start for row in rows.extends))
        if num_layers >= self._num_layers:
            return None
        return LayerGroup(0, num_layers, self._num_layers)

    def _group_size(self, num_tokens: int) -> int:
        """Return the layers of a group: as many as the limit allows, at least one. One while the
        time is not measured."""
        if not self._delays:
            return self._num_layers
        token_s = self._token_s()
        if token_s is None:
            return 1
        layer_s = token_s * num_tokens / self._num_layers
        return max(1, int(min(self._limit_s / layer_s, self._num_layers)))

    def _max_chunk_tokens(self) -> float:
        """Return the number of tokens that one layer can compute within the limit."""
        token_s = self._token_s()
        if not self._delays or not token_s:
            return math.inf
        return self._limit_s / (token_s / self._num_layers)

    @property
    def _delays(self) -> bool:
        """Return whether a prompt would delay a running request, or one that is about to run."""
        return len(self._running) > 0 or self._kept.slots > 0
