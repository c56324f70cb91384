"""A link: one worker thread in front of a BackendConnection to one producer instance.

It connects, proves and probes the path, then does one read after the other, so that a slow or dead
producer delays only its own reads. Large reads, and further probes while the link is idle, measure
the path again (LinkRate). The link knows deadlines and the fence. It does not know the protocol,
page counts, or how to open a successor.

    CONNECTING -> UP -> CLOSED

Every job ends exactly once: by a ReadEnded, or by the link's LinkClosed, which is its last event.
The job's destination pages must not be released before.

LinkRate measures the rate of a link, from probes and from reads of requests' pages.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from common.errors import Overloaded, TransferError
from kvtransfer.backends.base import BackendConnection, Ints, Moves, ReadRefused
from kvtransfer.messages import HandoffId
from kvtransfer.ports import PIECES, STATE, LinkMember, TablePages

GIB = 1 << 30
LEAST_BYTES = 1 << 20  # a shorter read measures the round trip rather than the rate
WINDOW = 8  # number of measurements used
FIRST_PROBE_S = 10.0  # seconds without a measurement until an idle link is probed again
MOST_PROBE_S = 300.0  # upper limit of this time, which doubles with each probe
NEWS = 1.25  # factor between two reported rates
SLOWEST = 0.1  # fraction of the probed rate at which a read is abandoned


class LinkRate:
    """The best of the last measurements. Other work on the two hosts can make a read slower, but
    never faster than the link.
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
        """Return when to probe the link, if it is idle then."""
        return self._measured_at + self._interval_s

    def probed(self, gib_per_s: float, now: float) -> None:
        self._interval_s = min(2.0 * self._interval_s, MOST_PROBE_S)
        self._add(gib_per_s, now)
        self._reported = self.gib_per_s

    def read(self, num_bytes: int, seconds: float, now: float) -> bool:
        """Record a read. Return whether the rate must be reported."""
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


@dataclass(frozen=True, slots=True, eq=False)
class LinkUp:
    """A proved and probed path. At most once, before any ReadEnded."""

    link: "PageLink"
    path: str  # nvlink | cuda_ipc | rdma | cma | tcp
    gib_per_s: float
    members: tuple[LinkMember, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RateMeasured:
    """A new rate of the path, from another probe or a read. After LinkUp."""

    link: "PageLink"
    gib_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class ReadEnded:
    """The end of one job: no byte of it can land any more. Several jobs may share an id."""

    link: "PageLink"
    handoff: HandoffId
    num_bytes: int
    num_parts: int  # pages, or parts of pages
    seconds: float
    refused: str  # empty: every byte has landed; else why the producer refused only this job


@dataclass(frozen=True, slots=True, eq=False)
class LinkClosed:
    """The end of the link: no byte can land through it any more. Exactly once, the last event."""

    link: "PageLink"
    reason: str
    unfinished: tuple[HandoffId, ...]  # one entry per job that was started or queued


LinkEvent: TypeAlias = LinkUp | RateMeasured | ReadEnded | LinkClosed


Notify: TypeAlias = Callable[[LinkEvent], None]


class PageLink(Protocol):
    """A link to one or several ranks of a producer. Link documents the methods."""

    producer: int

    def post(self, handoff: HandoffId, pages: "PagesToRead") -> None: ...

    def expect(self, destination_pages: Ints) -> None: ...

    @property
    def deadline(self) -> float | None: ...

    def expire(self, now: float) -> None: ...

    def close(self, reason: str) -> None: ...

    def join(self, timeout_s: float) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class PagesToRead:
    """The pages of one read, see StartRead."""

    source: Ints
    destination: Ints
    spans: tuple[TablePages, ...]

    def by_table(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield table, source and destination pages. The state is the table after the last one, of
        which `spans` has nothing."""
        start = 0
        for table, num_pages in self.spans:
            some = slice(start, start + num_pages)
            yield table, self.source[some], self.destination[some]
            start += num_pages
        if len(self.source) > start:
            yield STATE, self.source[start:], self.destination[start:]


class LinkBytes:
    """The bytes of each page that a link reads.

    Args:
        page_bytes: of this rank's pages.
        moves: None: whole pages.
    """

    def __init__(self, page_bytes: int, moves: Moves | None = None) -> None:
        self.moves = moves
        self._whole = page_bytes
        self._by_table = [sum(each.size for each in table) for table in moves or ()]

    @property
    def of_a_page(self) -> int:
        """Bytes of one page of every table, for comparisons of links."""
        return sum(self._by_table[:PIECES]) or self._whole

    def of(self, pages: PagesToRead) -> int:
        """Return the bytes of a read."""
        if self.moves is None:
            return len(pages.source) * self._whole
        return sum(
            self._by_table[STATE] if table == STATE else len(source) * self._by_table[table]
            for table, source, _ in pages.by_table()
        )

    def parts_of(self, pages: PagesToRead) -> int:
        """Return the number of pages of a read, or of parts of pages."""
        if self.moves is None:
            return len(pages.source)
        return sum(
            len(self.moves[table]) * (1 if table == STATE else len(source))
            for table, source, _ in pages.by_table()
        )

    def copy(self, connection: BackendConnection, pages: PagesToRead) -> None:
        """Read pages, see BackendConnection.copy."""
        if self.moves is None:
            if len(pages.source):
                connection.copy(pages.source, pages.destination)
            return
        for table, source, destination in pages.by_table():
            connection.copy(source, destination, table % len(self.moves))


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    handoff: HandoffId
    pages: PagesToRead


@dataclass(slots=True)
class _State:
    """All state that two threads use. Accessed only under the link's condition."""

    jobs: deque[_Job] = field(default_factory=deque)  # the first may be in progress
    expected: deque[int] = field(default_factory=deque)  # pages that later jobs read into
    under_way: bool = False
    due: float | None = None
    connection: BackendConnection | None = None
    closing: str | None = None  # the reason, once set


class Link:
    """Reads pages of one producer instance into the local pool.

    All methods except the worker's are for one thread, the caller's. None of them blocks.
    """

    def __init__(
        self,
        producer: int,
        connect: Callable[[], BackendConnection],
        notify: Notify,
        *,
        num_bytes: LinkBytes,
        read_s: float,
        min_gib_per_s: float = 0.0,
        max_jobs: int = 4096,
        take_memory: Callable[[int], None] = lambda page: None,
    ) -> None:
        """Start connecting at once.

        Args:
            producer: instance id of the producer. A new instance needs a new link.
            connect: called once, on the link's thread. May block for 5 s and raise TransferError.
            notify: called on the link's thread with each event. Must not block or raise. Put the
                event into a queue of the caller's and wake it.
            num_bytes: that the link reads. `connect` uses the same moves.
            read_s: a read may take this long plus its bytes at a tenth of the measured rate.
            min_gib_per_s: a slower link is closed instead of going up.
            max_jobs: jobs started or queued before `post` raises Overloaded.
            take_memory: called on the link's thread with a local page. Lets the system allocate the
                page's memory before it is written.
        """
        self.producer = producer
        self._connect = connect
        self._notify = notify
        self._num_bytes = num_bytes
        self._read_s = read_s
        self._min_gib_per_s = min_gib_per_s
        self._max_jobs = max_jobs
        self._take_memory = take_memory
        self._state = _State()
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name=f"link-{producer:016x}", daemon=True)
        self._thread.start()

    def post(self, handoff: HandoffId, pages: PagesToRead) -> None:
        """Queue a read. Allowed before LinkUp.

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
            self._state.jobs.append(_Job(handoff, pages))
            self._changed.notify()

    def expect(self, destination_pages: Ints) -> None:
        """Announce pages that later jobs read into. They are prepared while there is no job. By
        then they may belong to any holder, so their content is not changed.
        """
        with self._changed:
            expected = self._state.expected
            expected.extend(destination_pages[: self._max_jobs - len(expected)].tolist())
            self._changed.notify()

    @property
    def deadline(self) -> float | None:
        """Return the time.monotonic() at which the read or probe in progress is late. None without
        one.
        """
        with self._changed:
            return self._state.due

    def expire(self, now: float) -> None:
        """Close the link if the read in progress is late. Call it at `deadline`, or on a timer."""
        with self._changed:
            if self._state.due is not None and now >= self._state.due:
                self.close("a read passed its deadline")

    def close(self, reason: str) -> None:
        """End the link. LinkClosed follows after the fence. Idempotent, never blocks.

        While connecting this takes as long as `connect` does, otherwise milliseconds.
        """
        with self._changed:
            if self._state.closing is not None:
                return
            self._state.closing = reason
            if self._state.connection is not None:
                self._state.connection.stop()
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait until the link's thread has ended, at the end of the process. Returns whether it
        has.
        """
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

    def _probe(self, connection: BackendConnection) -> float:
        with self._changed:
            self._state.due = time.monotonic() + self._read_s
        gib_per_s = connection.probe()
        with self._changed:
            self._state.due = None
        return gib_per_s

    def _begin(self, connection: BackendConnection, rate: LinkRate) -> _Job | None:
        """Wait for the next job and mark it as in progress. Returns None when the link
        must close.
        """
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
            num_bytes = self._num_bytes.of(job.pages)
            allowed_s = self._read_s + num_bytes / (SLOWEST * rate.gib_per_s * GIB)
            self._state.under_way = True
            self._state.due = time.monotonic() + allowed_s
            return job

    def _is_idle(self, until: float) -> bool:
        """Wait until `until` for a job, for expected pages or for the link to close. Return whether
        there is still no job and the link stays open.
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
        ended = ReadEnded(self, job.handoff, num_bytes, num_parts, now - started, refused)
        with self._changed:
            self._state.jobs.popleft()
            self._state.under_way = False
            self._state.due = None
        self._notify(ended)
        if not refused and rate.read(num_bytes, ended.seconds, now):
            self._notify(RateMeasured(self, rate.gib_per_s))
