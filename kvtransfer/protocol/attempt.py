"""One hand-off at the reader, from Open to its end: the valid next messages, and the pages to read
into. Knows nothing of streams, links or deadlines.
"""

from dataclasses import dataclass, field

import numpy as np

from common.errors import EngineFault, ProtocolViolation
from common.page_tables import PageTables
from kvtransfer.messages import HandoffId, HandoffKind, HandoffQueued, PagesReady
from kvtransfer.ports import GrantCommand, Ints
from kvtransfer.protocol.link_reads import LinkRead
from kvtransfer.protocol.ranges import PageRanges, granted
from kvtransfer.protocol.status import HandoffStatus, advance


@dataclass(slots=True, eq=False)
class ConsumerHandoff:
    id: HandoffId
    stream: int
    num_tokens: int  # as opened
    tables: PageTables
    kind: HandoffKind = HandoffKind.PROMPT
    state: HandoffStatus = HandoffStatus.BOOTSTRAPPING
    destination: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    ranges: PageRanges | None = None  # from Grant on
    unread: int = 0  # ranges whose pages have not landed yet
    done_sent: bool = False
    admitted: HandoffQueued | None = None
    admitted_at: float = 0.0
    first_ready: float = 0.0
    landed: float = 0.0
    sums: tuple[tuple[int, int], ...] = ()  # of some destination pages

    def grant(self, command: GrantCommand) -> None:
        """Record the destination pages. Raises EngineFault if their number is wrong."""
        try:
            ranges = granted(
                self.kind,
                self.tables,
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

    def admit(self, message: HandoffQueued, now: float) -> None:
        """Record the admission. Raises ProtocolViolation unless the attempt is granted, this is its
        first admission, and the number of tokens to compute is possible.
        """
        if self.state is not HandoffStatus.WAITING_FOR_INPUT or self.admitted is not None:
            raise ProtocolViolation(f"Admitted of {self.id} while {self.state.name}")
        if message.compute_tokens > self.num_tokens:
            raise ProtocolViolation(
                f"{message.compute_tokens} of the {self.num_tokens} tokens of {self.id} to compute"
            )
        self.admitted = message
        self.admitted_at = now

    def begin_range(self, message: PagesReady, owner_pages: int, now: float) -> LinkRead | None:
        """Record the next range and return its read, or None if it has no pages.

        Args:
            owner_pages: pages in the owner's pool.
        Raises:
            ProtocolViolation: it cannot be the next range, or its pages cannot be right.
        """
        pages = message.pages
        if self.ranges is None:
            raise ProtocolViolation(f"Ready of {self.id} before Grant")
        if pages and not 0 <= min(pages) <= max(pages) < owner_pages:
            raise ProtocolViolation(f"a page id of {self.id} is outside [0, {owner_pages})")
        comes = message.last and self.kind.samples
        if comes is (message.first_token is None):
            raise ProtocolViolation(f"Ready of {self.id}: the first token comes with the last")
        self.ranges.follow(message.start, message.end, len(pages), last=message.last)
        if len(message.token_ids) != max(self.ranges.num_tokens - self.num_tokens, 0):
            raise ProtocolViolation(
                f"Ready of {self.id} with {len(message.token_ids)} tokens behind {self.num_tokens}"
            )
        if self.state is not HandoffStatus.TRANSFERRING:
            self.first_ready = now
        self.to(HandoffStatus.TRANSFERRING)
        if not pages:
            return None
        self.unread += 1
        destination = self.destination[self._places(self.ranges, message)]
        if message.sums:
            self.sums += tuple((int(destination[place]), sum_) for place, sum_ in message.sums)
        return LinkRead(self.id, np.array(pages, dtype=np.int32), destination)

    def _places(self, ranges: PageRanges, message: PagesReady) -> Ints:
        """Return the indices of the destination pages for a range's pages, in their order."""
        firsts, place = [], 0
        for table in ranges.tables.handed_over(ranges.num_tokens, ranges.start):
            firsts.append(place - table.first)
            place += table.num_pages
        spans = ranges.tables.spans(
            ranges.num_tokens, ranges.start, message.start, message.end, last=message.last
        )
        return np.concatenate(
            [np.arange(first, past, dtype=np.int32) + firsts[t] for t, first, past in spans]
        )

    @property
    def tokens_left(self) -> int:
        """Return the number of tokens that are not published yet. For a granted attempt only."""
        return self.num_tokens - self.ranges.next if self.ranges is not None else self.num_tokens

    @property
    def num_kv(self) -> int:
        """Return the number of tokens whose KV the reader has once all is read. For a granted
        attempt only.
        """
        return self.ranges.num_tokens if self.ranges is not None else 0

    @property
    def being_computed(self) -> bool:
        """Return whether the owner may be computing it, according to its messages. An admitted
        hand-off may be in the owner's next forward.
        """
        return self.admitted is not None and not (self.ranges is not None and self.ranges.complete)

    @property
    def all_read(self) -> bool:
        return self.ranges is not None and self.ranges.complete and not self.unread

    def to(self, new: HandoffStatus) -> None:
        self.state = advance(self.state, new)
