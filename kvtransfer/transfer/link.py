"""A link: one worker thread in front of a Connection to one owner instance.

It connects, proves and probes the path, then reads one job after the other, so that a slow or
dead owner delays nobody but itself. Large reads, and further probes while it is idle, measure the
path again (link_rate.py). It knows deadlines and the fence; it knows nothing of the
protocol, of page counts, or of how to open a successor.

    CONNECTING -> UP -> CLOSED

Every job ends exactly once: by a ReadEnded, by `drop`, or by the link's LinkClosed, which is its
last event. Not before one of these may the job's destination pages be let go.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from common.errors import Overloaded, TransferError
from kvtransfer.backends.base import Connection, Ints, ReadRefused
from kvtransfer.messages import HandoffId
from kvtransfer.transfer.link_rate import GIB, LinkRate

_SLOWEST = 0.1  # share of the probed rate at which a read is given up


@dataclass(frozen=True, slots=True, eq=False)
class LinkUp:
    """The path is proved and probed. At most once, before any ReadEnded."""

    link: "Link"
    path: str  # nvlink | cuda_ipc | rdma | cma | tcp | loopback
    gib_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class RateMeasured:
    """The path has been probed again, or a read has shown another rate. After LinkUp."""

    link: "Link"
    gib_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class ReadEnded:
    """One job is over and no byte of it can land any more. Several jobs may share an id."""

    link: "Link"
    handoff: HandoffId
    num_bytes: int
    seconds: float
    refused: str  # empty: every byte has landed; else why the owner refused this job alone


@dataclass(frozen=True, slots=True, eq=False)
class LinkClosed:
    """The link is gone and no byte can land through it any more. Exactly once, the last event."""

    link: "Link"
    reason: str
    unfinished: tuple[HandoffId, ...]  # one entry per job that was begun or queued


LinkEvent: TypeAlias = LinkUp | RateMeasured | ReadEnded | LinkClosed


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    handoff: HandoffId
    source_pages: Ints
    destination_pages: Ints


@dataclass(slots=True)
class _State:
    """Everything two threads touch; only under the link's condition."""

    jobs: deque[_Job] = field(default_factory=deque)  # the first may be under way
    expected: deque[int] = field(default_factory=deque)  # pages that jobs to come read into
    under_way: bool = False
    due: float | None = None
    connection: Connection | None = None
    closing: str | None = None  # the reason, once set


class Link:
    """Reads pages of one owner instance into the local pool.

    All methods but those of the worker are for one thread, the caller's; none of them blocks.
    """

    def __init__(
        self,
        owner: int,
        connect: Callable[[], Connection],
        notify: Callable[[LinkEvent], None],
        *,
        page_bytes: int,
        read_s: float,
        min_gib_per_s: float = 0.0,
        max_jobs: int = 4096,
        take_memory: Callable[[int], None] = lambda page: None,
    ) -> None:
        """Starts connecting at once.

        Args:
            owner: instance id of the owner; a new instance needs a new link.
            connect: called once, on the link's thread; may block for 5 s and raise TransferError.
            notify: called on the link's thread with each event; must not block or raise. Put the
                event into a queue of the caller's and wake it.
            read_s: a read may take this long plus its bytes at a tenth of the measured rate.
            min_gib_per_s: a slower link is closed instead of going up.
            max_jobs: jobs begun or queued before `post` raises Overloaded.
            take_memory: called on the link's thread with a local page: has the system give what it
                needs to be written.
        """
        self.owner = owner
        self._connect = connect
        self._notify = notify
        self._page_bytes = page_bytes
        self._read_s = read_s
        self._min_gib_per_s = min_gib_per_s
        self._max_jobs = max_jobs
        self._take_memory = take_memory
        self._state = _State()
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name=f"link-{owner:016x}", daemon=True)
        self._thread.start()

    def post(self, handoff: HandoffId, source_pages: Ints, destination_pages: Ints) -> None:
        """Queues the read of source_pages[i] into destination_pages[i]; legal before LinkUp.

        Page ids must have been range-checked, and the arrays must not change afterwards.

        Raises:
            TransferError: the link is closing, or its LinkClosed is on its way.
            Overloaded: max_jobs are queued. In both cases no event follows for this job.
        """
        with self._changed:
            if self._state.closing is not None:
                raise TransferError(f"the link is closed: {self._state.closing}")
            if len(self._state.jobs) >= self._max_jobs:
                raise Overloaded(f"{self._max_jobs} reads are queued on this link")
            self._state.jobs.append(_Job(handoff, source_pages, destination_pages))
            self._changed.notify()

    def expect(self, destination_pages: Ints) -> None:
        """Pages that jobs to come read into: what is to be done for that is done while there is no
        job. They may be anybody's by then: what is in them stays as it is."""
        with self._changed:
            expected = self._state.expected
            expected.extend(destination_pages[: self._max_jobs - len(expected)].tolist())
            self._changed.notify()

    def drop(self, handoff: HandoffId) -> int:
        """Forgets the jobs of this id that are not under way, and says how many they were. No
        event follows for these; at most one other job of the id is left, under way."""
        with self._changed:
            jobs = self._state.jobs
            kept = deque(
                job
                for i, job in enumerate(jobs)
                if job.handoff != handoff or (i == 0 and self._state.under_way)
            )
            self._state.jobs = kept
            return len(jobs) - len(kept)

    @property
    def deadline(self) -> float | None:
        """time.monotonic() at which the read or probe under way is late; None without one."""
        with self._changed:
            return self._state.due

    def expire(self, now: float) -> None:
        """Closes the link if the read under way is late. Call it at `deadline`, or on a timer."""
        with self._changed:
            if self._state.due is not None and now >= self._state.due:
                self.close("a read passed its deadline")

    def close(self, reason: str) -> None:
        """Ends the link: LinkClosed follows once the fence stands. Idempotent, never blocks.

        While connecting this takes as long as `connect` does, else milliseconds.
        """
        with self._changed:
            if self._state.closing is not None:
                return
            self._state.closing = reason
            if self._state.connection is not None:
                self._state.connection.stop()
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Waits until the link's thread has ended: for the end of a program. True if it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # On the link's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "fault in the link's thread"
        try:
            self._serve()
        except TransferError as error:
            reason = str(error)
        finally:
            with self._changed:
                if self._state.closing is None:
                    self._state.closing = reason
                closed = LinkClosed(
                    self, self._state.closing, tuple(job.handoff for job in self._state.jobs)
                )
            self._notify(closed)

    def _serve(self) -> None:
        connection = self._connect()
        try:
            with self._changed:
                self._state.connection = connection
                if self._state.closing is not None:
                    return
            gib_per_s = self._probe(connection)
            if gib_per_s < self._min_gib_per_s:
                raise TransferError(
                    f"{connection.path} gives {gib_per_s:.2f} GiB/s, less than the configured "
                    f"{self._min_gib_per_s:.2f}"
                )
            self._notify(LinkUp(self, connection.path, gib_per_s))
            rate = LinkRate(gib_per_s, time.monotonic())
            while (job := self._begin(connection, rate)) is not None:
                self._read(connection, rate, job)
        finally:
            with self._changed:
                self._state.connection = None
                self._state.due = None
            connection.close()

    def _probe(self, connection: Connection) -> float:
        with self._changed:
            self._state.due = time.monotonic() + self._read_s
        gib_per_s = connection.probe()
        with self._changed:
            self._state.due = None
        return gib_per_s

    def _begin(self, connection: Connection, rate: LinkRate) -> _Job | None:
        """The next job, marked as under way; waits for one. None: the link is to close."""
        while self._is_idle(rate.probe_at):
            page = self._expected_page()
            if page is not None:
                self._take_memory(page)
            elif time.monotonic() >= rate.probe_at:
                rate.probed(self._probe(connection), time.monotonic())
                self._notify(RateMeasured(self, rate.gib_per_s))
        with self._changed:
            if self._state.closing is not None:
                return None
            job = self._state.jobs[0]
            num_bytes = len(job.source_pages) * self._page_bytes
            allowed_s = self._read_s + num_bytes / (_SLOWEST * rate.gib_per_s * GIB)
            self._state.under_way = True
            self._state.due = time.monotonic() + allowed_s
            return job

    def _is_idle(self, until: float) -> bool:
        """Wait until `until` for a job, for expected pages or for the link to close. Return whether
        there is still no job, and the link stays."""
        state = self._state
        with self._changed:
            self._changed.wait_for(
                lambda: state.jobs or state.expected or state.closing is not None,
                max(0.0, until - time.monotonic()),
            )
            return not state.jobs and state.closing is None

    def _expected_page(self) -> int | None:
        with self._changed:
            return self._state.expected.popleft() if self._state.expected else None

    def _read(self, connection: Connection, rate: LinkRate, job: _Job) -> None:
        started = time.monotonic()
        refused = ""
        try:
            connection.copy(job.source_pages, job.destination_pages)
        except ReadRefused as error:
            refused = str(error)
        num_bytes = len(job.source_pages) * self._page_bytes
        now = time.monotonic()
        ended = ReadEnded(self, job.handoff, num_bytes, now - started, refused)
        with self._changed:
            self._state.jobs.popleft()
            self._state.under_way = False
            self._state.due = None
        self._notify(ended)
        if not refused and rate.read(num_bytes, ended.seconds, now):
            self._notify(RateMeasured(self, rate.gib_per_s))
