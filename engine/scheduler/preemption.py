"""Preemption: a waiting request replaces running ones that are much less urgent.

Preempted requests are swapped out to host memory like retracted ones (retraction.py), keep their
slots, and come back. While they are away, only requests that could have preempted them are
admitted. A swapped-out request gains one priority step per STEP_S, until no request goes before it.
A request is preempted only a limited number of times. Every request therefore comes back and ends.
"""

import math
from collections.abc import Mapping

import numpy as np

from common.config import SchedulerConfig
from common.priority import CLASSES, class_of
from engine.batch.request import Request
from engine.core import EngineCore
from engine.kv_cache.pages import PageHolder
from engine.scheduler.arrivals import FreeCapacity
from engine.scheduler.quarantine import QuarantineQueue
from engine.scheduler.retraction import RetractedRequests, victims_first
from engine.scheduler.running import RunningBatch

MAX_PREEMPTIONS = 8  # per request
_KEEPS_BUSY = (
    PageHolder.REQUEST,
    PageHolder.READ,
    PageHolder.PUBLICATION,
)  # a step's hold ends by itself


class Preemption:
    """Preemption of running requests. Engine thread only.

    Attributes:
        counts: preempted requests since the start, by class.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        core: EngineCore,
        running: RunningBatch,
        retracted: RetractedRequests,
        quarantine: QuarantineQueue,
    ) -> None:
        self._by = config.preemption_threshold  # how much less urgent a victim must be; 0: disabled
        self._most = config.max_preempted_requests  # swapped-out requests at which preemption stops
        self._table = core.table
        self._pages = core.pages
        self._running = running
        self._retracted = retracted
        self._quarantine = quarantine
        self.counts = dict.fromkeys(CLASSES, 0)

    @property
    def min_priority(self) -> float:
        """Minimum priority that admission accepts now. Swapped-out requests come first."""
        if not self._retracted:
            return -math.inf
        return self._retracted.highest_rank() + self._by if self._by else math.inf

    def bar(self, most_urgent: float) -> float:
        """Return the rank that a swapped-out request must exceed to come back while a request of
        priority `most_urgent` waits for capacity."""
        return most_urgent - self._by if self._by else -math.inf

    def may_help(self, priority: float) -> bool:
        """Return whether a request of that priority might preempt any running one."""
        slots = self._running.slots
        return bool(
            self._by and len(slots) and self._table.priority[slots].min() + self._by <= priority
        )

    def preempt_for(
        self, priority: int, num_pages: int, room: FreeCapacity, requests: Mapping[int, Request]
    ) -> None:
        """Preempt as few requests as make room for one of that priority, or none if all victims
        together would not. The pages are free once the step that saves them is finished.

        Args:
            num_pages: pages that it needs.
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
        """Return the possible victims. Requests whose last token is in flight end anyway."""
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
        """Return the first victims that together make room, or none if all together do not."""
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
