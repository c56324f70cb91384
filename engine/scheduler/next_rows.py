"""The choice of the rows of the next forward: prompt rows, optionally with decode rows, or all
decode rows if there are no prompts.

If a decode row lacks a page, another request is retracted. If the step computes prompts, the row
only waits instead. Requests that may share no forward (common/requests/quarantine.py) get every
second step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.admission import ExtendRow, PrefillAdmission
from engine.scheduler.preemption import Preemption
from engine.scheduler.quarantine import QuarantineQueue
from engine.scheduler.residents import SlotOwners
from engine.scheduler.retraction import Retraction
from engine.scheduler.running import RunningBatch

_NO_SLOTS = np.empty(0, np.intp)


@dataclass(slots=True)
class ReservedCapacity:
    """Capacity that admission must leave to requests that are going to join with their KV.

    Attributes:
        slots: one for each of those that holds pages already. A request that holds pages must
            be able to join, and thereby to be retracted. Otherwise a last running request could
            wait for those pages for ever.
        pages: for the growth of those.
        barrier: requests whose place is behind it wait, because a request that is going to join
            is ahead of them and has waited for capacity too long.
        most_urgent: highest priority of those that are going to join and wait for capacity;
            -inf: none.
    """

    slots: int = 0
    pages: int = 0
    barrier: float = math.inf
    most_urgent: float = -math.inf


class SelectedRows(NamedTuple):
    """The rows of a forward. decodes: slots."""

    extends: Sequence[ExtendRow]
    decodes: NDArray[np.intp]


NO_ROWS = SelectedRows((), _NO_SLOTS)


class RowSelector:
    """The choice of each forward's rows. Engine thread only."""

    def __init__(
        self,
        kept: ReservedCapacity,
        *,
        mixed_chunk: bool,
        admission: PrefillAdmission,
        running: RunningBatch,
        quarantine: QuarantineQueue,
        residents: SlotOwners,
        retraction: Retraction,
        preemption: Preemption,
    ) -> None:
        """Create the selector from the parts of a scheduler.

        Args:
            mixed_chunk: whether decode rows share forwards with prompts.
        """
        self._kept = kept
        self._mixed_chunk = mixed_chunk
        self._admission = admission
        self._running = running
        self._quarantine = quarantine
        self._residents = residents
        self._retraction = retraction
        self._preemption = preemption
        self._after_trial = False

    def turns(self) -> Sequence[bool]:
        """Return which kinds of step to try, in order. False: a shared step; True: a step of one
        suspect request alone. The two kinds alternate."""
        if not self._quarantine and not self._admission.suspect_waits:
            return (False,)
        return (False, True) if self._after_trial else (True, False)

    def choose(self, alone: bool) -> SelectedRows | None:
        """Choose rows that may share a forward, or one request that may not. Return None if there
        are none. The caller must launch the rows."""
        rows = self._of_one() if alone else self._of_all()
        if not rows.extends and not len(rows.decodes):
            return None
        self._after_trial = alone
        return rows

    @property
    def reserved_pages(self) -> int:
        """Pages not for new requests: for the growth of those that run or are going to join."""
        return self._running.growth() + self._kept.pages

    def _of_all(self) -> SelectedRows:
        if extends := self._extends(suspect=False):
            return SelectedRows(extends, self._riders() if self._mixed_chunk else _NO_SLOTS)
        return SelectedRows((), self._decodes(self._quarantine.outside(self._running.ready())))

    def _of_one(self) -> SelectedRows:
        if extends := self._extends(suspect=True):
            return SelectedRows(extends, _NO_SLOTS)
        return SelectedRows((), self._decodes(self._quarantine.inside(self._running.ready())[:1]))

    def _extends(self, *, suspect: bool) -> list[ExtendRow]:
        admission, kept = self._admission, self._kept
        if admission.chunked is None and not admission.has_slot(kept.slots):
            return []
        return admission.next_rows(
            reserved_pages=self.reserved_pages,
            num_decode_rows=len(self._running.ready()) if self._mixed_chunk else 0,
            min_priority=self._preemption.min_priority,
            kept_slots=kept.slots,
            barrier=kept.barrier,
            alone=self._residents.all_away,
            suspect=suspect,
        )

    def _riders(self) -> NDArray[np.intp]:
        """Return the decode rows that share a forward with a chunk: those that can get a page, if
        they need one."""
        slots = self._quarantine.outside(self._running.ready())
        full = self._running.full(slots)
        if len(full) and not self._running.grow(full):
            return slots[~np.isin(slots, full)]
        if len(slots):
            self._running.ratio.decay()
        return slots

    def _decodes(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return those of `slots` that can continue."""
        full = self._running.full(slots)
        if len(full) and not self._running.grow(full):
            # All running rows are considered: the missing pages may belong to quarantined rows or
            # to others.
            kept = self._retraction.retract_for(self._running.ready(), self._residents.by_slot)
            return slots[np.isin(slots, kept)]
        self._running.ratio.decay()
        return slots
