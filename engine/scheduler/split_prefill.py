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
from dataclasses import dataclass

import numpy as np

from engine.batch.batch import LayerGroup
from engine.batch.table import SlotTable
from engine.scheduler.admission import PrefillAdmission
from engine.scheduler.assembly import DecodeRows, LaunchedSteps, ScheduledStep, StepAssembler
from engine.scheduler.next_rows import RowSelector, SelectedRows, StepKind
from engine.scheduler.retraction import NO_SWAPS, HostSwaps
from engine.scheduler.running import NO_SLOTS
from engine.scheduler.slot_owners import SlotOwners

_UNKNOWN_STEP = np.iinfo(np.int64).max  # number of the forward's last step, which is not known yet


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The limits of a group of layers.

    Attributes:
        limit_s: maximum time of a group, in seconds.
        token_s: returns the seconds per prompt token through all layers. None: not measured yet.
    """

    limit_s: float
    num_layers: int
    token_s: Callable[[], float | None]

    def group_size(self, num_tokens: int) -> int:
        """Return the layers of a group: as many as the limit allows, at least one. One while the
        time is not measured."""
        token_s = self.token_s()
        if token_s is None:
            return 1
        layer_s = token_s * num_tokens / self.num_layers
        return max(1, int(min(self.limit_s / layer_s, self.num_layers)))

    def max_chunk_tokens(self) -> float:
        """Return the number of tokens that one layer can compute within the limit."""
        token_s = self.token_s()
        return self.limit_s / (token_s / self.num_layers) if token_s else math.inf


class SplitSelector:
    """Chooses the rows and layers of each step, and assembles the steps of groups. At most one
    forward is between two groups of its layers (`LaunchedSteps.split`). Engine thread only.

    Args:
        rows: the selector for whole forwards, without decode rows beside prompts.
    """

    def __init__(
        self,
        rows: RowSelector,
        limits: GroupLimits,
        *,
        table: SlotTable,
        admission: PrefillAdmission,
        owners: SlotOwners,
        assembler: StepAssembler,
        launched: LaunchedSteps,
    ) -> None:
        self._rows = rows
        self._limits = limits
        self._table = table
        self._admission = admission
        self._owners = owners
        self._assembler = assembler
        self._launched = launched
        self._next_layer = 0  # first layer of the next group
        self._decodes_next = False

    def kinds_to_try(self) -> Sequence[StepKind]:
        """See RowSelector. Quarantined requests wait while a forward is between its groups."""
        return (StepKind.SHARED,) if self._launched.split else self._rows.kinds_to_try()

    def choose(self, kind: StepKind) -> SelectedRows | None:
        """See RowSelector. After each step with prompts, decode rows are next."""
        delays = self._rows.delays_requests
        self._admission.max_chunk_tokens = self._limits.max_chunk_tokens() if delays else math.inf
        if kind is StepKind.QUARANTINED:
            return self._rows.choose(kind)
        if self._decodes_next and (rows := self._rows.choose(kind, prompts=False)) is not None:
            self._decodes_next = False
            return rows
        split = self._launched.split
        rows = self._rows.choose(kind) if split is None else self._next_group(split)
        if rows is not None and (rows.extends or rows.layers is not None):
            self._decodes_next = True
            if rows.extends:
                return rows._replace(layers=self._first_group(rows))
        return rows

    def choose_rest(self) -> SelectedRows:
        """Return all remaining layers of the forward that is between its groups."""
        assert self._launched.split is not None
        group = self._next_group(self._launched.split)
        layers = group.layers
        assert layers is not None
        return group if layers.drops else group._replace(layers=layers._replace(past=layers.total))

    def step(self, rows: SelectedRows, layers: LayerGroup, swaps: HostSwaps) -> ScheduledStep:
        """Return the step of one group of layers."""
        forward = self._launched.split
        if not layers.first:
            forward = self._begun(rows)
        assert forward is not None
        self._next_layer = layers.past
        self._launched.split = None if layers.is_last or layers.drops else forward
        return self._assembler.group(forward, layers, swaps)

    def _begun(self, rows: SelectedRows) -> ScheduledStep:
        forward = self._assembler.assemble(rows.extends, DecodeRows(rows.decodes), NO_SWAPS)
        self._table.hold(forward.slots, _UNKNOWN_STEP)
        for row in rows.extends:
            self._owners.record(row.slot, row.request)
        return forward

    def _first_group(self, rows: SelectedRows) -> LayerGroup | None:
        """Return the first group of layers. None: all layers."""
        total = self._limits.num_layers
        num_layers = self._group_size(sum(row.end - row.start for row in rows.extends))
        return None if num_layers >= total else LayerGroup(0, num_layers, total)

    def _next_group(self, forward: ScheduledStep) -> SelectedRows:
        """Return the next group of a forward. It has no layers if all its requests have ended or
        are to end."""
        first, total = self._next_layer, self._limits.num_layers
        ends = all(
            row.request.to_finish is not None or row.request.slot != row.slot
            for row in forward.extends
        )
        size = 0 if ends else self._group_size(forward.batch.num_tokens)
        return SelectedRows((), NO_SLOTS, LayerGroup(first, min(first + size, total), total))

    def _group_size(self, num_tokens: int) -> int:
        """Return the layers of a group: all if no request would be delayed."""
        limits = self._limits
        if not self._rows.delays_requests:
            return limits.num_layers
        return limits.group_size(num_tokens)
