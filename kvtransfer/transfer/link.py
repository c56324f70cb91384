"""A link: one worker thread that reads from one producer instance through a BackendConnection.
`LinkRate` measures the rate of the link.

The thread connects, proves and probes the path, and then does one read after the other. A slow or
dead producer therefore delays only its own reads. Large reads, and further probes while the link is
idle, measure the rate again. A link enforces deadlines and guarantees that no byte lands after it
has closed. It does not know the protocol, count pages, or open its own successor.

    CONNECTING -> UP -> CLOSED

Every job ends exactly once: by a ReadEnded, or by the link's LinkClosed, which is its last event.
Until then, the job's destination pages must not be released.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from common.errors import Overloaded, TransferError
from kvtransfer.backends.base import BackendConnection, Ints, ReadRefused, TableSlices
from kvtransfer.messages import HandoffId
from kvtransfer.ports import PIECES, STATE, LinkMember, PagesToRead

GIB = 1 << 30
LEAST_BYTES = 1 << 20  # a shorter read measures the round trip, not the rate
WINDOW = 8  # measurements that count
FIRST_PROBE_S = 10.0  # seconds without a measurement until an idle link is probed
MOST_PROBE_S = 300.0  # upper limit of that time, which doubles with each probe
NEWS = 1.25  # change of the rate, as a factor, that is reported
SLOWEST = 0.1  # fraction of the probed rate below which a read is abandoned


class LinkRate:
    """The rate of a link, as the best of the last measurements. Other work on the two hosts makes a
    read slower, but never faster, than the link.
    """

    def __init__(self, gib_per_s: float, now: float) -> None:
        """
        Args:
            gib_per_s: result of the first probe.
        """
        self._measured = deque([gib_per_s], maxlen=WINDOW)
        self._reported = gib_per_s
        self._interval_s = FIRST_PROBE_S
        self._measured_at = now

    @property
    def gib_per_s(self) -> float:
        return max(self._measured)

    @property
    def probe_at(self) -> float:
        """Time at which to probe the link if it is idle."""
        return self._measured_at + self._interval_s

    def probed(self, gib_per_s: float, now: float) -> None:
        self._interval_s = min(2.0 * self._interval_s, MOST_PROBE_S)
        self._add(gib_per_s, now)
        self._reported = self.gib_per_s

    def read(self, num_bytes: int, seconds: float, now: float) -> bool:
        """Record a read. Returns whether the rate must be reported."""
        if num_bytes < LEAST_BYTES or seconds <= 0.0:
            return False
        self._add(num_bytes / GIB / seconds, now)
        if self._reported / NEWS < self.gib_per_s < self._reported * NEWS:
            return False
        self._reported = self.gib_per_s
        return True

    def _add(self, gib_per_s: float, now: float) -> None:
        self._measured.append(gib_per_s)
        self._measured_at = now


class LinkUp(msgspec.Struct, frozen=True, array_like=True):
    """The path is proved and probed. At most once, before any ReadEnded."""

    path: str  # nvlink | cuda_ipc | rdma | cma | tcp
    gib_per_s: float
    members: tuple[LinkMember, ...] = ()


class RateMeasured(msgspec.Struct, frozen=True):
    """A new rate of the path, from another probe or a read. After LinkUp."""

    gib_per_s: float


class ReadEnded(msgspec.Struct, frozen=True, array_like=True):
    """The end of one job: no more bytes of it land. Several jobs may share an id."""

    handoff: HandoffId
    num_bytes: int = 0
    num_parts: int = 0  # pages, or parts of pages
    seconds: float = 0.0
    refused: str = ""  # why the producer refused this job; empty: every byte has landed

    def beside(self, other: "ReadEnded") -> "ReadEnded":
        """Return the end of this job and of another part of it, read at the same time."""
        return ReadEnded(
            self.handoff,
            self.num_bytes + other.num_bytes,
            self.num_parts + other.num_parts,
            max(self.seconds, other.seconds),
            self.refused or other.refused,
        )


class LinkClosed(msgspec.Struct, frozen=True):
    """The end of the link: no byte lands through it any more. Exactly once, the last event."""

    reason: str
    unfinished: tuple[HandoffId, ...]  # one entry per unfinished job


LinkEvent: TypeAlias = LinkUp | RateMeasured | ReadEnded | LinkClosed


Notify: TypeAlias = Callable[[LinkEvent], None]


class PageLink(Protocol):
    """The interface of a link to one or several ranks of a producer. Link documents the methods."""

    producer: int

    def post(self, handoff: HandoffId, pages: PagesToRead) -> None: ...

    def expect(self, destination_pages: Ints) -> None: ...

    @property
    def deadline(self) -> float | None: ...

    def expire(self, now: float) -> None: ...

    def close(self, reason: str) -> None: ...

    def join(self, timeout_s: float) -> bool: ...


class LinkBytes:
    """The bytes of each page that a link reads.

    Args:
        page_bytes: size of this rank's pages.
        slices: byte ranges, see ReadMap. None: whole pages.
    """

    def __init__(self, page_bytes: int, slices: TableSlices | None = None) -> None:
        self.slices = slices
        self._whole = page_bytes
        self._by_table = [sum(each.size for each in table) for table in slices or ()]

    @property
    def of_a_page(self) -> int:
        """Bytes read of one page of every table, to compare links."""
        return sum(self._by_table[:PIECES]) or self._whole

    def of(self, pages: PagesToRead) -> int:
        """Return the number of bytes of a read."""
        if self.slices is None:
            return len(pages.source) * self._whole
        return sum(
            self._by_table[STATE] if table == STATE else len(source) * self._by_table[table]
            for table, source, _ in pages.by_table()
        )

    def parts_of(self, pages: PagesToRead) -> int:
        """Return the number of pages, or of byte ranges in pages, of a read."""
        if self.slices is None:
            return len(pages.source)
        return sum(
            len(self.slices[table]) * (1 if table == STATE else len(source))
            for table, source, _ in pages.by_table()
        )

    def copy(self, connection: BackendConnection, pages: PagesToRead) -> None:
        """Read pages, see BackendConnection.copy."""
        if self.slices is None:
            if len(pages.source):
                connection.copy(pages.source, pages.destination)
            return
        for table, source, destination in pages.by_table():
            connection.copy(source, destination, table % len(self.slices))


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    handoff: HandoffId
    pages: PagesToRead


@dataclass(slots=True)
class _State:
    """The state that both threads use. Accessed only under the link's condition."""

    jobs: deque[_Job] = field(default_factory=deque)  # the first may be in progress
    expected: deque[int] = field(default_factory=deque)  # pages that later jobs will read into
    due: float | None = None
    connection: BackendConnection | None = None
    closing: str | None = None  # reason for closing, once requested


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits of a link.

    Attributes:
        read_s: time limit of a read, in addition to its bytes at a tenth of the measured rate.
        min_gib_per_s: a slower link closes instead of coming up.
        max_jobs: unfinished jobs before `post` raises Overloaded.
    """

    read_s: float
    min_gib_per_s: float = 0.0
    max_jobs: int = 4096


class Link:
    """Reads pages of one producer instance into the local pool.

    One thread, the owner's, calls all public methods. None of them blocks except `join`.
    """

    def __init__(
        self,
        producer: int,
        connect: Callable[[], BackendConnection],
        notify: Notify,
        *,
        num_bytes: LinkBytes,
        limits: LinkLimits,
        ranks: tuple[int, int] = (0, 0),
        take_memory: Callable[[int], None] = lambda page: None,
    ) -> None:
        """Start connecting at once.

        Args:
            producer: instance id of the producer. A new instance needs a new link.
            connect: called once, on the link's thread. May block for 5 s and raise TransferError.
            notify: called on the link's thread with each event. Must not block or raise. Usually
                puts the event into the owner's queue and wakes the owner.
            num_bytes: counts the bytes of reads. `connect` must use the same byte ranges.
            ranks: this rank and the producer's, which LinkUp reports.
            take_memory: called on the link's thread with a local page id. Makes the system allocate
                the page's memory before it is written.
        """
        self.producer = producer
        self._connect = connect
        self._notify = notify
        self._num_bytes = num_bytes
        self._limits = limits
        self._ranks = ranks
        self._take_memory = take_memory
        self._state = _State()
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name=f"link-{producer:016x}", daemon=True)
        self._thread.start()

    def post(self, handoff: HandoffId, pages: PagesToRead) -> None:
        """Queue a read. Allowed before LinkUp.

        The page ids must be in range. The arrays must not change afterwards.

        Raises:
            TransferError: the link is closing or closed.
            Overloaded: max_jobs are queued. In both cases, no event follows for this job.
        """
        with self._changed:
            if self._state.closing is not None:
                raise TransferError(f"the link is closed: {self._state.closing}")
            if len(self._state.jobs) >= self._limits.max_jobs:
                raise Overloaded(f"{self._limits.max_jobs} reads are queued on this link")
            self._state.jobs.append(_Job(handoff, pages))
            self._changed.notify()

    def expect(self, destination_pages: Ints) -> None:
        """Announce pages that later jobs read into. Their memory is allocated while the link is
        idle. The pages may have another holder by then, so their content is not changed.
        """
        with self._changed:
            expected = self._state.expected
            expected.extend(destination_pages[: self._limits.max_jobs - len(expected)].tolist())
            self._changed.notify()

    @property
    def deadline(self) -> float | None:
        """Time, by time.monotonic(), at which the read or probe in progress is late. None: nothing
        is in progress.
        """
        with self._changed:
            return self._state.due

    def expire(self, now: float) -> None:
        """Close the link if the read in progress is late. Call it at `deadline` or periodically."""
        with self._changed:
            if self._state.due is not None and now >= self._state.due:
                self.close("a read passed its deadline")

    def close(self, reason: str) -> None:
        """Close the link. LinkClosed follows when no byte can land any more, within milliseconds,
        or when `connect` returns. Idempotent, never blocks.
        """
        with self._changed:
            if self._state.closing is not None:
                return
            self._state.closing = reason
            if self._state.connection is not None:
                self._state.connection.stop()
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait at the end of the process for the link's thread. Returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # On the link's thread

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
                unfinished = tuple(job.handoff for job in self._state.jobs)
                closed = LinkClosed(self._state.closing, unfinished)
            self._notify(closed)

    def _serve(self) -> None:
        connection = self._connect()
        try:
            with self._changed:
                self._state.connection = connection
                if self._state.closing is not None:
                    return
            gib_per_s = self._probe(connection)
            if gib_per_s < self._limits.min_gib_per_s:
                raise TransferError(
                    f"{connection.path} gives {gib_per_s:.2f} GiB/s, less than the configured "
                    f"{self._limits.min_gib_per_s:.2f}"
                )
            member = LinkMember(*self._ranks, connection.path, gib_per_s)
            self._notify(LinkUp(connection.path, gib_per_s, (member,)))
            rate = LinkRate(gib_per_s, time.monotonic())
            while (job := self._begin(connection, rate)) is not None:
                self._read(connection, rate, job)
        finally:
            with self._changed:
                self._state.connection = None
                self._state.due = None
            connection.close()

    def _probe(self, connection: BackendConnection) -> float:
        with self._changed:
            self._state.due = time.monotonic() + self._limits.read_s
        gib_per_s = connection.probe()
        with self._changed:
            self._state.due = None
        return gib_per_s

    def _begin(self, connection: BackendConnection, rate: LinkRate) -> _Job | None:
        """Wait for the next job and mark it as in progress. Returns None if the link must close."""
        while self._is_idle(rate.probe_at):
            page = self._expected_page()
            if page is not None:
                self._take_memory(page)
            elif time.monotonic() >= rate.probe_at:
                rate.probed(self._probe(connection), time.monotonic())
                self._notify(RateMeasured(rate.gib_per_s))
        with self._changed:
            if self._state.closing is not None:
                return None
            job = self._state.jobs[0]
            num_bytes = self._num_bytes.of(job.pages)
            allowed_s = self._limits.read_s + num_bytes / (SLOWEST * rate.gib_per_s * GIB)
            self._state.due = time.monotonic() + allowed_s
            return job

    def _is_idle(self, until: float) -> bool:
        """Wait until `until` for a job, for expected pages, or for a request to close. Returns
        whether the link is still open and has no job.
        """
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

    def _read(self, connection: BackendConnection, rate: LinkRate, job: _Job) -> None:
        started = time.monotonic()
        refused = ""
        try:
            self._num_bytes.copy(connection, job.pages)
        except ReadRefused as error:
            refused = str(error)
        num_bytes = self._num_bytes.of(job.pages)
        now = time.monotonic()
        num_parts = self._num_bytes.parts_of(job.pages)
        ended = ReadEnded(job.handoff, num_bytes, num_parts, now - started, refused)
        with self._changed:
            self._state.jobs.popleft()
            self._state.due = None
        self._notify(ended)
        if not refused and rate.read(num_bytes, ended.seconds, now):
            self._notify(RateMeasured(rate.gib_per_s))
