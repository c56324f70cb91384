"""Choice of the rows of the next forward.

A forward has prompt rows, optionally with decode rows, or only decode rows if there are no prompts.
If a decode row lacks a page, another request is retracted. If the step computes prompts, the row
waits instead. Quarantined requests, which share no forward (common/request.py), get every second
step.

Preemption: a waiting request replaces running requests that are much less urgent. Preempted
requests are swapped out to host memory like retracted ones (retraction.py), keep their slots, and
come back. While they are away, only requests that could have preempted them are admitted. A
swapped-out request gains one priority level per STEP_S, until no request goes before it. A request
is preempted only a limited number of times. Every request therefore comes back and ends.

Prefill delayer: in a data-parallel group, all nodes wait for the node whose step takes longest. A
step with a prompt takes much longer than a decode step. While decode rows run, a node therefore
announces its prompts one step ahead. The prompts wait, for a limited number of steps, until most
nodes that could compute prompts have some.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.config import SchedulerConfig
from common.queueing import CLASSES, class_of
from engine.batch.batch import LayerGroup
from engine.batch.request import Request
from engine.core import EngineCore
from engine.kv_cache.pages import PageHolder
from engine.scheduler.admission import ExtendRow, PrefillAdmission
from engine.scheduler.arrivals import FreeCapacity, KeptCapacity
from engine.scheduler.retraction import RetractedRequests, Retraction, victims_first
from engine.scheduler.running import NO_SLOTS, QuarantineQueue, RunningBatch
from engine.scheduler.slot_owners import SlotOwners

MAX_PREEMPTIONS = 8  # per request
_KEEPS_BUSY = (
    PageHolder.REQUEST,
    PageHolder.READ,
    PageHolder.PUBLICATION,
)  # a step's hold ends by itself


class Preemption:
    """Preemption of running requests. Engine thread only.

    Attributes:
        counts: preempted requests since the start, by priority class.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        core: EngineCore,
        running: RunningBatch,
        retracted: RetractedRequests,
        quarantine: QuarantineQueue,
    ) -> None:
        # Minimum difference of priorities. 0: preemption is disabled.
        self._by = config.preemption_threshold
        # No preemption while this many requests are swapped out.
        self._most = config.max_preempted_requests
        self._table = core.table
        self._pages = core.pages
        self._running = running
        self._retracted = retracted
        self._quarantine = quarantine
        self.counts = dict.fromkeys(CLASSES, 0)

    @property
    def min_priority(self) -> float:
        """Minimum priority that admission accepts now. Swapped-out requests come before new
        ones."""
        if not self._retracted:
            return -math.inf
        return self._retracted.highest_rank() + self._by if self._by else math.inf

    def rank_to_exceed(self, most_urgent: float) -> float:
        """Return the rank that a swapped-out request must exceed to come back while a request of
        priority `most_urgent` waits."""
        return most_urgent - self._by if self._by else -math.inf

    def may_help(self, priority: float) -> bool:
        """Return whether a request of that priority might preempt a running one."""
        slots = self._running.slots
        return bool(
            self._by and len(slots) and self._table.priority[slots].min() + self._by <= priority
        )

    def preempt_for(
        self, priority: int, num_pages: int, room: FreeCapacity, requests: Mapping[int, Request]
    ) -> None:
        """Preempt as few requests as possible to make room for one of that priority.

        Preempts none if even all victims would not suffice. The pages are free once the step that
        saves them is finished.

        Args:
            num_pages: pages that the request needs.
            room: pages and slots that are free.
        """
        chosen = self._enough(self._victims(priority, requests), num_pages, room)
        for slot in chosen:
            request = requests[slot]
            request.preemptions += 1
            self._running.leave(slot)
            self._retracted.retract(request)
            saved = self._retracted.save(request)
            assert saved, "host memory was counted before"
            self.counts[class_of(request.spec.priority)] += 1

    def _victims(self, priority: int, requests: Mapping[int, Request]) -> list[int]:
        """Return the requests that may be preempted. Excludes requests that end with the token in
        flight."""
        slots = self._quarantine.outside(self._running.ready())
        slots = slots[self._table.priority[slots] + self._by <= priority]
        slots = slots[~np.isin(slots, self._retracted.returning())]
        return [
            slot
            for slot in victims_first(self._table, slots)
            if requests[slot].preemptions < MAX_PREEMPTIONS
            and requests[slot].rank() + self._by <= priority
        ]

    def _enough(self, victims: list[int], num_pages: int, room: FreeCapacity) -> list[int]:
        """Return the first victims that together make enough room, or none if all of them do
        not."""
        missing, host_left = num_pages - room.num_pages, self._retracted.num_host_pages_free
        holds = np.sum([self._pages.holds(holder) for holder in _KEEPS_BUSY], axis=0)
        chosen: list[int] = []
        for slot in victims[: max(self._most - len(self._retracted), 0)]:
            if missing <= 0 and room.num_slots + len(chosen) > 0:
                break
            num_saved = self._retracted.num_saved(slot)
            if num_saved > host_left:
                continue
            host_left -= num_saved
            mine = self._table.pages_of(slot)
            holds[mine] -= 1
            missing -= int(np.count_nonzero(holds[mine] == 0))
            missing -= self._running.growth(np.array([slot], np.intp))
            chosen.append(slot)
        return chosen if missing <= 0 and room.num_slots + len(chosen) > 0 else []


class StepKind(Enum):
    """Which requests a step may compute."""

    SHARED = auto()  # any requests that are not quarantined
    QUARANTINED = auto()  # one quarantined request, alone


class SelectedRows(NamedTuple):
    """The rows of a forward.

    Attributes:
        extends: prompt rows.
        decodes: slots of the decode rows.
        layers: a group of layers of the rows in `extends`, or the next group of a split prefill.
            None: all layers.
    """

    extends: Sequence[ExtendRow]
    decodes: NDArray[np.intp]
    layers: LayerGroup | None = None


NO_ROWS = SelectedRows((), NO_SLOTS)


class RowSelector:
    """Chooses the rows of each forward. Engine thread only.

    Args:
        mixed_chunk: whether decode rows share forwards with prompts.
    Attributes:
        admits_prompts: False: prompts wait, except quarantined ones (prefill delayer).
    """

    def __init__(
        self,
        kept: KeptCapacity,
        *,
        mixed_chunk: bool,
        admission: PrefillAdmission,
        running: RunningBatch,
        quarantine: QuarantineQueue,
        owners: SlotOwners,
        retraction: Retraction,
        preemption: Preemption,
    ) -> None:
        self._kept = kept
        self._mixed_chunk = mixed_chunk
        self._admission = admission
        self._running = running
        self._quarantine = quarantine
        self._owners = owners
        self._retraction = retraction
        self._preemption = preemption
        self._after_quarantined = False
        self.admits_prompts = True

    def kinds_to_try(self) -> Sequence[StepKind]:
        """Return the kinds of step to try, in order. The two kinds alternate."""
        if not self._quarantine and not self._admission.quarantined_waits:
            return (StepKind.SHARED,)
        kinds = (StepKind.QUARANTINED, StepKind.SHARED)
        return kinds[::-1] if self._after_quarantined else kinds

    def choose(self, kind: StepKind, *, prompts: bool = True) -> SelectedRows | None:
        """Choose the rows of a step of this kind. The caller must launch them.

        Args:
            prompts: False: only decode rows, unless the kind is QUARANTINED.
        Returns:
            None if there are no such rows.
        """
        if kind is StepKind.QUARANTINED:
            rows = self._of_one()
        elif prompts and self.admits_prompts:
            rows = self._of_all()
        else:
            rows = self._of_decodes()
        if not rows.extends and not len(rows.decodes):
            return None
        self._after_quarantined = kind is StepKind.QUARANTINED
        return rows

    @property
    def reserved_pages(self) -> int:
        """Pages that new requests may not use: the growth of running requests, and kept pages."""
        return self._running.growth() + self._kept.pages

    @property
    def delays_requests(self) -> bool:
        """Return whether a prompt would delay a running request, or one that is about to run."""
        return len(self._running) > 0 or self._kept.slots > 0

    def _of_all(self) -> SelectedRows:
        if extends := self._extends(quarantined=False):
            return SelectedRows(extends, self._riders() if self._mixed_chunk else NO_SLOTS)
        return self._of_decodes()

    def _of_decodes(self) -> SelectedRows:
        return SelectedRows((), self._decodes(self._quarantine.outside(self._running.ready())))

    def _of_one(self) -> SelectedRows:
        if extends := self._extends(quarantined=True):
            return SelectedRows(extends, NO_SLOTS)
        return SelectedRows((), self._decodes(self._quarantine.inside(self._running.ready())[:1]))

    def _extends(self, *, quarantined: bool) -> list[ExtendRow]:
        admission, min_priority = self._admission, self._preemption.min_priority
        if admission.chunked is None and not admission.has_slot(min_priority):
            return []
        return admission.next_rows(
            reserved_pages=self.reserved_pages,
            num_decode_rows=len(self._running.ready()) if self._mixed_chunk else 0,
            min_priority=min_priority,
            device_empty=self._owners.all_away,
            quarantined=quarantined,
        )

    def _riders(self) -> NDArray[np.intp]:
        """Return the decode rows that share a forward with a chunk: rows that need no page, or for
        which a page is available."""
        slots = self._quarantine.outside(self._running.ready())
        if not len(slots):
            return slots
        full = self._running.full(slots)
        if len(full) and not self._running.grow(full):
            return slots[~np.isin(slots, full)]
        self._running.ratio.decay()
        return slots

    def _decodes(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the slots among `slots` that can continue."""
        full = self._running.full(slots)
        due = len(slots) > 0 and self._retraction.is_due()
        if due or (len(full) and not self._running.grow(full)):
            # Consider all running rows, because any of them may have the missing pages.
            ready, requests = self._running.ready(), self._owners.by_slot
            kept = self._retraction.retract_for(ready, requests, least=int(due))
            return slots[np.isin(slots, kept)]
        self._running.ratio.decay()
        return slots


MAX_PASSES = 30


class PrefillCounts(NamedTuple):
    """Numbers of nodes of a data-parallel group.

    Attributes:
        with_room: nodes that could admit a prompt.
        ready: nodes with room where prompts wait.
        decoding: nodes with decode rows, which a prompt would delay.
        chunking: nodes where a prompt is partly computed. Its next chunk is not delayed.
    """

    with_room: int
    ready: int
    decoding: int
    chunking: int


def prefills_now(counts: PrefillCounts, waited: int) -> bool:
    """Return whether the group computes prompts in the next step. `waited`: number of steps that
    prompts have waited for each other."""
    costs_nothing = not counts.decoding or counts.chunking > 0
    return costs_nothing or 2 * counts.ready > counts.with_room or waited >= MAX_PASSES
