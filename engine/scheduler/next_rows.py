"""Which rows the next forward computes: of prompts, with those that decode riding along, or, where
there are none, of all that decode.

Where a page is missing for one that decodes, another one is retracted; beside a prompt it merely
waits. Requests that may share no forward (common/requests/quarantine.py) have every second step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.admission import Admission, ExtendRow
from engine.scheduler.growth import NewTokenRatio
from engine.scheduler.preemption import Preemption
from engine.scheduler.quarantine import Quarantine
from engine.scheduler.residents import Residents
from engine.scheduler.retraction import Retraction
from engine.scheduler.running import RunningBatch

_NO_SLOTS = np.empty(0, np.intp)


@dataclass(slots=True)
class Kept:
    """What nobody who is let in may take: it is for those who are going to join, with their KV.

    Attributes:
        slots: one for each of those that holds pages already. Whoever holds pages must be able to
            join, and so to be retracted: else a last running request can wait for those pages for
            ever.
        pages: for the growth of those.
        barrier: requests whose place is behind this wait: somebody who is going to join is before
            them, and has waited for room for too long.
        most_urgent: priority of those that are going to join and wait for room; -inf: nobody does.
    """

    slots: int = 0
    pages: int = 0
    barrier: float = math.inf
    most_urgent: float = -math.inf


class Rows(NamedTuple):
    """Of a forward. decodes: slots."""

    extends: Sequence[ExtendRow]
    decodes: NDArray[np.intp]


NO_ROWS = Rows((), _NO_SLOTS)


class NextRows:
    """Engine thread only."""

    def __init__(
        self,
        kept: Kept,
        *,
        mixed_chunk: bool,
        admission: Admission,
        running: RunningBatch,
        quarantine: Quarantine,
        residents: Residents,
        retraction: Retraction,
        preemption: Preemption,
        ratio: NewTokenRatio,
    ) -> None:
        """
        Args:
            mixed_chunk: whether rows that decode ride beside prompts.
        """
        self._kept = kept
        self._mixed_chunk = mixed_chunk
        self._admission = admission
        self._running = running
        self._quarantine = quarantine
        self._residents = residents
        self._retraction = retraction
        self._preemption = preemption
        self._ratio = ratio
        self._after_trial = False

    def turns(self) -> Sequence[bool]:
        """Whether the next step is one of all, or of a suspect request alone; they take turns."""
        if not self._quarantine and not self._admission.suspect_waits:
            return (False,)
        return (False, True) if self._after_trial else (True, False)

    def choose(self, alone: bool) -> Rows | None:
        """Of all that may share a forward, or of one request that may not; None: there are none.
        Who asks must launch them."""
        rows = self._of_one() if alone else self._of_all()
        if not rows.extends and not len(rows.decodes):
            return None
        self._after_trial = alone
        return rows

    @property
    def reserved_pages(self) -> int:
        """Not for anybody new: for the growth of what runs, and of what is going to join."""
        return self._running.growth(self._ratio.value) + self._kept.pages

    def _of_all(self) -> Rows:
        if extends := self._extends(suspect=False):
            return Rows(extends, self._riders() if self._mixed_chunk else _NO_SLOTS)
        return Rows((), self._decodes(self._quarantine.outside(self._running.ready())))

    def _of_one(self) -> Rows:
        if extends := self._extends(suspect=True):
            return Rows(extends, _NO_SLOTS)
        return Rows((), self._decodes(self._quarantine.inside(self._running.ready())[:1]))

    def _extends(self, *, suspect: bool) -> list[ExtendRow]:
        admission, kept = self._admission, self._kept
        if admission.chunked is None and not admission.has_slot(kept.slots):
            return []
        return admission.next_rows(
            reserved_pages=self.reserved_pages,
            num_decode_rows=len(self._running.ready()) if self._mixed_chunk else 0,
            floor=self._preemption.floor,
            kept_slots=kept.slots,
            barrier=kept.barrier,
            alone=self._residents.all_away,
            suspect=suspect,
        )

    def _riders(self) -> NDArray[np.intp]:
        """Decode rows beside a chunk: those that find a page, if they need one."""
        slots = self._quarantine.outside(self._running.ready())
        full = self._running.full(slots)
        if len(full) and not self._running.grow(full):
            return slots[~np.isin(slots, full)]
        if len(slots):
            self._ratio.decay()
        return slots

    def _decodes(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of `slots` that can go on."""
        full = self._running.full(slots)
        if len(full) and not self._running.grow(full):
            # Of all: pages that keep these from going on may be in a quarantine, or outside.
            kept = self._retraction.make_room(self._running.ready(), self._residents.by_slot)
            return slots[np.isin(slots, kept)]
        self._ratio.decay()
        return slots
