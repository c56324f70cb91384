"""Preemption: a request that waits takes the place of running ones that are much less urgent.

Those go to host memory as the retracted do (retracted.py), keep their slots, and come back. While
they are away nobody is let in but who might have taken their place too. What is away gets more
urgent with the time, a step in each STEP_S, until nobody goes before it; and who was preempted a
few times is never again. So everybody comes back, and ends.
"""

import math
from collections.abc import Mapping

import numpy as np

from common.priority import CLASSES, class_of
from engine.batch.request import Request
from engine.batch.table import RequestTable
from engine.kv_cache.pages import Holder, PageAllocator
from engine.scheduler.arrivals import Room
from engine.scheduler.growth import NewTokenRatio
from engine.scheduler.quarantine import Quarantine
from engine.scheduler.retracted import RetractedRequests
from engine.scheduler.retraction import victims_first
from engine.scheduler.running import RunningBatch

MAX_PREEMPTIONS = 8  # of one request
_KEEPS_BUSY = (Holder.REQUEST, Holder.READ, Holder.PUBLICATION)  # a step's hold ends by itself


class Preemption:
    """Engine thread only.

    Attributes:
        counts: requests that were preempted since the start, by class.
    """

    def __init__(
        self,
        by: int,
        most: int,
        *,
        table: RequestTable,
        pages: PageAllocator,
        running: RunningBatch,
        retracted: RetractedRequests,
        quarantine: Quarantine,
        ratio: NewTokenRatio,
    ) -> None:
        """
        Args:
            by: how much less urgent one must be; 0: nobody is ever preempted.
            most: that may be off the device for it to go on.
        """
        self.by = by
        self._most = most
        self._table = table
        self._pages = pages
        self._running = running
        self._retracted = retracted
        self._quarantine = quarantine
        self._ratio = ratio
        self.counts = dict.fromkeys(CLASSES, 0)

    @property
    def floor(self) -> float:
        """Who is less urgent than this is not let in: who was taken off the device comes first."""
        if not self._retracted:
            return -math.inf
        return self._retracted.highest_rank() + self.by if self.by else math.inf

    def bar(self, most_urgent: float) -> float:
        """Whose rank is no higher than this does not come back, while one that is so urgent waits
        for room."""
        return most_urgent - self.by if self.by else -math.inf

    def may_help(self, priority: float) -> bool:
        """Whether one of that priority might take anybody's place."""
        slots = self._running.slots
        return bool(
            self.by and len(slots) and self._table.priority[slots].min() + self.by <= priority
        )

    def make_room(
        self, priority: int, num_pages: int, room: Room, requests: Mapping[int, Request]
    ) -> None:
        """Takes off the device whom one of that priority may take the place of, as few as make room
        for it; nobody, if all of them would not. The room is there once the step that saves them
        is finished.

        Args:
            num_pages: that it needs.
            room: that there is.
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
        """Those that have their last token in flight end anyway."""
        slots = self._quarantine.outside(self._running.ready())
        slots = slots[self._table.priority[slots] + self.by <= priority]
        slots = slots[~np.isin(slots, self._retracted.returning())]
        return [
            slot
            for slot in victims_first(self._table, slots)
            if requests[slot].preemptions < MAX_PREEMPTIONS
            and requests[slot].rank() + self.by <= priority
        ]

    def _enough(self, victims: list[int], num_pages: int, room: Room) -> list[int]:
        """The first of them that together make room; none where all do not."""
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
            missing -= self._running.growth(self._ratio.value, np.array([slot], np.intp))
            chosen.append(slot)
        return chosen if missing <= 0 and room.num_slots + len(chosen) > 0 else []
