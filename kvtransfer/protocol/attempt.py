"""The state of one hand-off at the consumer (`ConsumerHandoff`), and the reads of the links
(`ConsumerLinks`). Used by ConsumerEnd.

A hand-off checks the producer's messages and has the pages to read into. It knows no streams, links
or deadlines.

Each stream has a link. Its reads either wait here or are posted to the link, where they may write
until they end. A closing link outlives its stream. Methods return the actions to carry out.

    OPENING -> UP -> CLOSING -> removed, or OPENING again while the stream is open
"""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from common.errors import EngineFault, ProtocolViolation
from common.page_tables import PageSpan, PageTables
from kvtransfer.messages import HandoffAdmitted, HandoffId, PagesReady, Prompt, Source
from kvtransfer.ports import (
    STATE,
    GrantCommand,
    Ints,
    PagesToRead,
    ReadsEndedEvent,
    tables_of,
)
from kvtransfer.protocol.actions import CloseLink, ConsumerAction, OpenLink, PageSum, StartRead
from kvtransfer.protocol.progress import (
    DeadlineTimer,
    HandoffStatus,
    PageRanges,
    advance,
    granted,
    table_pages,
)

# One read in progress, and one for the link to continue with. The rest wait here, where the end of
# their attempt removes them at once.
READS_AHEAD = 2


class ProducerPages(NamedTuple):
    """The pages of a producer, as described in its Hello.

    Attributes:
        same_layout: its pages are byte for byte laid out like local ones.
        piece_bytes: size of the smaller of both nodes' pages on rank 0.
    """

    num_pages: int  # in its pool
    state_pages: int  # of one request
    same_layout: bool
    piece_bytes: int


class LinkState(Enum):
    OPENING = "opening"
    UP = "up"
    CLOSING = "closing"


@dataclass(slots=True)
class LinkReads:
    state: LinkState = LinkState.OPENING
    waiting: deque[StartRead] = field(default_factory=deque)
    posted: deque[StartRead] = field(default_factory=deque)  # in the order in which they will end


# Time for a link to come up, from opening it or requesting its close. Covers several paths of 5 s
# to connect and 5 s to probe.
LINK_S = 30.0


class ConsumerLinks:
    """The links by stream, and their reads. Knows the attempt of each read, not its outcome."""

    def __init__(self) -> None:
        self._links: dict[int, LinkReads] = {}
        # Attempt -> posted reads, from grant to ReadsEndedEvent.
        self._landing: dict[HandoffId, int] = {}
        self._deadlines: DeadlineTimer[int] = DeadlineTimer()

    @property
    def num_reads(self) -> int:
        return sum(self._landing.values())

    def open(self, stream: int, now: float) -> OpenLink:
        """Open a stream's link, for the first time or after it closed."""
        self._links.setdefault(stream, LinkReads()).state = LinkState.OPENING
        self._deadlines.set(stream, now + LINK_S)
        return OpenLink(stream)

    def proved(self, stream: int) -> bool:
        """Mark the link as up. Returns False, without effect, if it is being closed."""
        link = self._links[stream]
        if link.state is not LinkState.OPENING:
            return False
        link.state = LinkState.UP
        self._deadlines.drop(stream)
        return True

    def close(self, stream: int, reason: str, now: float) -> CloseLink:
        """Close the link. It is opened again afterwards."""
        self._links[stream].state = LinkState.CLOSING
        self._deadlines.set(stream, now + LINK_S)
        return CloseLink(stream, reason)

    def stream_over(self, stream: int, reason: str) -> list[ConsumerAction]:
        """Close the link of an ended stream permanently, if it exists."""
        self._deadlines.drop(stream)
        if stream not in self._links:
            return []
        self._links[stream].state = LinkState.CLOSING
        return [CloseLink(stream, reason)]

    def gone(self, stream: int) -> None:
        """Remove a link that has closed permanently."""
        del self._links[stream]

    def is_opening(self, stream: int) -> bool:
        return self._links[stream].state is LinkState.OPENING

    def is_up(self, stream: int) -> bool:
        return self._links[stream].state is LinkState.UP

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def take_overdue(self, now: float) -> list[int]:
        """Return the streams whose link did not come up in time."""
        return self._deadlines.take_due(now)

    def granted(self, id: HandoffId) -> None:
        """Record that reads may use the attempt's pages from now on.

        Raises:
            EngineFault: it was granted before.
        """
        if id in self._landing:
            raise EngineFault(f"{id} was granted twice")
        self._landing[id] = 0

    def read(self, read: StartRead) -> list[ConsumerAction]:
        self._links[read.stream].waiting.append(read)
        return self.post(read.stream)

    def post(self, stream: int) -> list[ConsumerAction]:
        """Start queued reads up to the link's limit."""
        link, actions = self._links[stream], list[ConsumerAction]()
        while link.state is LinkState.UP and link.waiting and len(link.posted) < READS_AHEAD:
            read = link.waiting.popleft()
            link.posted.append(read)
            self._landing[read.id] += 1
            actions.append(read)
        return actions

    def first_posted(self, stream: int) -> HandoffId | None:
        """Return the attempt whose read the link has in progress, or None."""
        posted = self._links[stream].posted
        return posted[0].id if posted else None

    def read_ended(self, stream: int) -> HandoffId:
        """End the first posted read. Returns its attempt."""
        read = self._links[stream].posted.popleft()
        self._landing[read.id] -= 1
        return read.id

    def closed(self, stream: int, going_on: Container[HandoffId]) -> list[HandoffId]:
        """Handle a closed link, through which no byte can land any more. Unfinished reads of the
        attempts in `going_on` wait until the link is open again (rule 11). Returns the other
        attempts.
        """
        link, over = self._links[stream], []
        while link.posted:
            read = link.posted.pop()
            self._landing[read.id] -= 1
            if read.id in going_on:
                link.waiting.appendleft(read)
            else:
                over.append(read.id)
        return over

    def forget(self, stream: int, id: HandoffId) -> None:
        """Drop the waiting reads of an attempt. Posted reads cannot be cancelled."""
        if (link := self._links.get(stream)) is not None:
            link.waiting = deque(read for read in link.waiting if read.id != id)

    def settle(self, id: HandoffId) -> list[ConsumerAction]:
        """Return ReadsEndedEvent for an ended attempt if no byte of it can land any more, or []."""
        if self._landing.get(id) != 0:
            return []
        del self._landing[id]
        return [ReadsEndedEvent(id)]


@dataclass(slots=True, eq=False)
class ConsumerHandoff:
    id: HandoffId
    stream: int
    num_tokens: int  # as opened
    tables: PageTables
    producer: ProducerPages
    kind: type[Source] = Prompt
    state: HandoffStatus = HandoffStatus.BOOTSTRAPPING
    destination: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    ranges: PageRanges | None = None  # from Grant on
    unread: int = 0  # ranges whose pages have not landed
    done_sent: bool = False
    admitted: HandoffAdmitted | None = None
    admitted_at: float = 0.0
    first_ready: float = 0.0
    landed: float = 0.0
    sums: tuple[PageSum, ...] = ()  # checksums of some destination pages

    def grant(self, command: GrantCommand) -> None:
        """Record the destination pages. Raises EngineFault if their number is wrong."""
        try:
            ranges = granted(
                self.kind,
                replace(self.tables, state_pages=self.producer.state_pages),
                destination=self.tables,
                num_tokens=self.num_tokens,
                prefix_tokens=command.prefix_tokens,
                room_tokens=command.room_tokens,
            )
        except ProtocolViolation as error:
            raise EngineFault(f"cannot grant {self.id}: {error}") from error
        if len(command.destination_pages) != ranges.num_pages:
            raise EngineFault(
                f"{self.id} was granted {len(command.destination_pages)} pages, "
                f"not {ranges.num_pages}"
            )
        self.destination = command.destination_pages
        self.ranges = ranges
        self.to(HandoffStatus.WAITING_FOR_INPUT)

    def admit(self, message: HandoffAdmitted, now: float) -> None:
        """Record that the producer has queued the hand-off.

        Raises:
            ProtocolViolation: the attempt is not granted or already queued, or the number of tokens
                to compute is impossible.
        """
        if self.state is not HandoffStatus.WAITING_FOR_INPUT or self.admitted is not None:
            raise ProtocolViolation(f"Admitted of {self.id} while {self.state.name}")
        if message.compute_tokens > self.num_tokens:
            raise ProtocolViolation(
                f"Admitted of {self.id} with {message.compute_tokens} tokens to compute "
                f"of {self.num_tokens}"
            )
        self.admitted = message
        self.admitted_at = now

    def begin_range(self, message: PagesReady, now: float) -> StartRead | None:
        """Record the next published range and return its read, or None if it has no pages.

        Raises:
            ProtocolViolation: the range does not follow the last one, or its pages are wrong.
        """
        pages = message.pages
        if self.ranges is None:
            raise ProtocolViolation(f"Ready of {self.id} before Grant")
        if pages and not 0 <= min(pages) <= max(pages) < self.producer.num_pages:
            raise ProtocolViolation(
                f"a page id of {self.id} is outside [0, {self.producer.num_pages})"
            )
        comes = message.last and self.kind.samples
        if comes is (message.output is None):
            raise ProtocolViolation(
                f"Ready of {self.id}: the first token must be in the last Ready"
            )
        self.ranges.follow(message.start, message.end, len(pages), last=message.last)
        num_fresh = 0 if message.output is None else len(message.output.token_ids)
        if num_fresh != max(self.ranges.num_tokens - self.num_tokens, 0):
            raise ProtocolViolation(
                f"Ready of {self.id} with {num_fresh} tokens after {self.num_tokens}"
            )
        if self.state is not HandoffStatus.TRANSFERRING:
            self.first_ready = now
        self.to(HandoffStatus.TRANSFERRING)
        if not pages:
            return None
        self.unread += 1
        spans = self.ranges.destination.spans(
            self.ranges.num_tokens, self.ranges.start, message.start, message.end, last=message.last
        )
        destination = self.destination[self._places(self.ranges, spans)]
        of_tables = table_pages(self.kind, self.ranges.destination, spans)
        tables = tables_of(of_tables, len(pages)) if message.sums else []
        self.sums += tuple(
            PageSum(int(destination[place]), tables[place], checksum)
            for place, checksum in message.sums
            if self.producer.same_layout or tables[place] != STATE
        )
        source = np.array(pages, dtype=np.int32)
        return StartRead(self.stream, self.id, PagesToRead(source, destination, of_tables))

    @staticmethod
    def _places(ranges: PageRanges, spans: tuple[PageSpan, ...]) -> Ints:
        """Return the indices of the destination pages for the spans of a range, in order."""
        firsts, place = [], 0
        for table in ranges.destination.handed_over(ranges.num_tokens, ranges.start):
            firsts.append(place - table.first)
            place += table.num_pages
        return np.concatenate(
            [np.arange(first, past, dtype=np.int32) + firsts[t] for t, first, past in spans]
        )

    @property
    def tokens_left(self) -> int:
        """Number of tokens not published yet. Granted attempts only."""
        return self.num_tokens - self.ranges.next if self.ranges is not None else self.num_tokens

    @property
    def num_kv(self) -> int:
        """Number of tokens whose KV the consumer has after all reads. Granted attempts only."""
        return self.ranges.num_tokens if self.ranges is not None else 0

    @property
    def being_computed(self) -> bool:
        """Return whether the producer may be computing it, according to its messages. A queued
        hand-off may be in the producer's next forward pass.
        """
        return self.admitted is not None and not (self.ranges is not None and self.ranges.complete)

    @property
    def all_read(self) -> bool:
        return self.ranges is not None and self.ranges.complete and not self.unread

    def to(self, new: HandoffStatus) -> None:
        self.state = advance(self.state, new)
