"""Several links to the ranks of one producer, used as one link.

Each member reads its own part of every page. The group has the events of Link: a job ends when
every member has ended it, and the group is closed when no member can write any more. All members
get the jobs in the order in which they were posted, so jobs end in that order.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from common.errors import Overloaded, TransferError
from kvtransfer.backends.base import Ints
from kvtransfer.messages import HandoffId
from kvtransfer.ports import LinkMember, PagesToRead
from kvtransfer.transfer.link import (
    LinkClosed,
    LinkEvent,
    LinkUp,
    Notify,
    PageLink,
    RateMeasured,
    ReadEnded,
)


@dataclass(slots=True, eq=False)
class _Job:
    ended: ReadEnded  # by the members that have ended it
    reading: int  # members that have not


@dataclass(slots=True, eq=False)
class _Member:
    link: PageLink
    jobs: deque[_Job] = field(default_factory=deque)  # not ended by this member
    path: str = ""  # empty: not up yet
    gib_per_s: float = 0.0
    members: tuple[LinkMember, ...] = ()
    closed: bool = False


class LinkGroup:
    """A link whose members read from, or with, several ranks. The methods are those of Link."""

    def __init__(
        self,
        producer: int,
        makers: Sequence[Callable[[Notify], PageLink]],
        notify: Notify,
        *,
        shares: Sequence[int],
        max_jobs: int = 4096,
    ) -> None:
        """Start connecting all members at once.

        Args:
            makers: one function per member, which returns a new link with the given `notify`.
            notify: called on a member's thread with each event of the group, as by Link.
            shares: bytes that each member reads of each page.
            max_jobs: unfinished jobs before `post` raises Overloaded.
        """
        self.producer = producer
        self._notify = notify
        self._shares = tuple(shares)
        self._max_jobs = max_jobs
        self._jobs: deque[_Job] = deque()
        self._closing: str | None = None  # reason for closing, once requested
        self._events: deque[LinkEvent] = deque()  # events not delivered yet
        self._delivering = False
        # Members acquire it without holding their own locks. It is held while members are created,
        # because the first may already report events.
        self._lock = threading.RLock()
        with self._lock:
            self._members = [
                _Member(make(partial(self._take, number))) for number, make in enumerate(makers)
            ]

    def post(self, handoff: HandoffId, pages: PagesToRead) -> None:
        with self._lock:
            if self._closing is not None:
                raise TransferError(f"the link is closed: {self._closing}")
            if len(self._jobs) >= self._max_jobs:
                raise Overloaded(f"{self._max_jobs} reads are queued on this link")
            job = _Job(ReadEnded(handoff), len(self._members))
            try:
                for member in self._members:
                    member.link.post(handoff, pages)
                    member.jobs.append(job)
            except TransferError as error:
                self.close(str(error))  # some members read it and the others never will
                raise
            self._jobs.append(job)

    def expect(self, destination_pages: Ints) -> None:
        self._members[0].link.expect(destination_pages)

    @property
    def deadline(self) -> float | None:
        deadlines = (member.link.deadline for member in self._members)
        return min((each for each in deadlines if each is not None), default=None)

    def expire(self, now: float) -> None:
        deadline = self.deadline
        if deadline is not None and now >= deadline:
            self.close("a read passed its deadline")

    def close(self, reason: str) -> None:
        with self._lock:
            if self._closing is None:
                self._closing = reason
                for member in self._members:
                    member.link.close(reason)

    def join(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        joined = [member.link.join(max(0.0, until - time.monotonic())) for member in self._members]
        return all(joined)

    # On a member's thread

    def _take(self, number: int, event: LinkEvent) -> None:
        with self._lock:
            self._note(self._members[number], event)
        self._deliver()

    def _note(self, member: _Member, event: LinkEvent) -> None:
        match event:
            case LinkUp(path, gib_per_s, members):
                member.path, member.gib_per_s, member.members = path, gib_per_s, members
                if self._is_up and self._closing is None:
                    whole = itertools.chain.from_iterable(each.members for each in self._members)
                    path, gib_per_s = self._slowest.path, self._gib_per_s
                    self._events.append(LinkUp(path, gib_per_s, tuple(whole)))
            case RateMeasured(gib_per_s):
                member.gib_per_s = gib_per_s
                if self._is_up and self._closing is None:
                    self._events.append(RateMeasured(self._gib_per_s))
            case ReadEnded():
                self._end(member, event)
            case LinkClosed(reason):
                member.closed = True
                self.close(reason)
                if all(each.closed for each in self._members):
                    unfinished = tuple(job.ended.handoff for job in self._jobs)
                    self._events.append(LinkClosed(self._closing or reason, unfinished))

    def _deliver(self) -> None:
        """Deliver events in order, with the lock released, because this group may be a member of
        another group, whose lock is held while it posts to this one. Only one thread delivers at a
        time.
        """
        while True:
            with self._lock:
                if self._delivering or not self._events:
                    return
                self._delivering, event = True, self._events.popleft()
            self._notify(event)
            with self._lock:
                self._delivering = False

    def _end(self, member: _Member, event: ReadEnded) -> None:
        job = member.jobs.popleft()
        job.reading -= 1
        job.ended = job.ended.beside(event)
        if not job.reading:
            self._jobs.popleft()
            self._events.append(job.ended)

    @property
    def _is_up(self) -> bool:
        return all(member.path for member in self._members)

    @property
    def _slowest(self) -> _Member:
        return self._members[self._times.index(max(self._times))]

    @property
    def _gib_per_s(self) -> float:
        """Return the rate of all members together, limited by the slowest."""
        return sum(self._shares) / max(self._times)

    @property
    def _times(self) -> list[float]:
        return [
            share / member.gib_per_s
            for share, member in zip(self._shares, self._members, strict=True)
        ]
