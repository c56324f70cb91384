"""The links of a reader, one for each of its streams, and the end of all reads of an attempt.

A closing link outlives its stream. Pure, like the ConsumerEnd that owns it: methods return the
actions to carry out.
"""

from collections.abc import Container

from common.errors import EngineFault
from kvtransfer.messages import HandoffId
from kvtransfer.ports import ReadsEndedEvent
from kvtransfer.protocol.actions import CloseLink, OpenLink, ReaderAction, StartRead
from kvtransfer.protocol.deadlines import DeadlineTimer
from kvtransfer.protocol.link_reads import LinkRead, LinkReads, LinkState

# Longest time until a link is up, from opening it or requesting its close: several paths of 5 s to
# connect and 5 s to probe.
LINK_S = 30.0


class ConsumerLinks:
    """Links by stream. Knows the attempt of each read, not its outcome."""

    def __init__(self) -> None:
        self._links: dict[int, LinkReads] = {}
        self._landing: dict[HandoffId, int] = {}  # posted reads, from grant to ReadsEndedEvent
        self._deadlines: DeadlineTimer[int] = DeadlineTimer()

    @property
    def num_reads(self) -> int:
        """Return the number of reads given to links and not ended."""
        return sum(self._landing.values())

    # Links ----------------------------------------------------------------------------------------

    def open(self, stream: int, now: float) -> OpenLink:
        """Open the first link of a stream, or the successor of a closed one."""
        self._links.setdefault(stream, LinkReads()).state = LinkState.OPENING
        self._deadlines.set(stream, now + LINK_S)
        return OpenLink(stream)

    def proved(self, stream: int) -> bool:
        """Mark the link as up. Returns False, with no effect, if its close was requested
        meanwhile.
        """
        link = self._links[stream]
        if link.state is not LinkState.OPENING:
            return False
        link.state = LinkState.UP
        self._deadlines.drop(stream)
        return True

    def close(self, stream: int, reason: str, now: float) -> CloseLink:
        """Close the link. Another one is opened after it has closed."""
        self._links[stream].state = LinkState.CLOSING
        self._deadlines.set(stream, now + LINK_S)
        return CloseLink(stream, reason)

    def stream_over(self, stream: int, reason: str) -> list[ReaderAction]:
        """Close the link of an ended stream permanently, if there is one."""
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
        """Return the streams whose link is not up in time."""
        return self._deadlines.take_due(now)

    # Reads ----------------------------------------------------------------------------------------

    def granted(self, id: HandoffId) -> None:
        """Record that reads may use the attempt's pages from now on.

        Raises:
            EngineFault: it was granted before.
        """
        if id in self._landing:
            raise EngineFault(f"{id} was granted twice")
        self._landing[id] = 0

    def read(self, stream: int, read: LinkRead) -> list[ReaderAction]:
        self._links[stream].waiting.append(read)
        return self.post(stream)

    def post(self, stream: int) -> list[ReaderAction]:
        """Start queued reads up to the link's limit."""
        link, actions = self._links[stream], list[ReaderAction]()
        while (read := link.next_to_post()) is not None:
            self._landing[read.id] += 1
            actions.append(StartRead(stream, read.id, read.source_pages, read.destination_pages))
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
        """Handle a closed link, through which no byte can land any more. Unfinished reads of
        attempts in `going_on` wait for its successor (rule 11). Returns the attempts of the others.
        """
        link, over = self._links[stream], []
        for read in reversed(link.closed()):
            self._landing[read.id] -= 1
            if read.id in going_on:
                link.waiting.appendleft(read)
            else:
                over.append(read.id)
        return over

    def forget(self, stream: int, id: HandoffId) -> None:
        """Drop the waiting reads of an ended attempt."""
        if stream in self._links:
            self._links[stream].forget(id)

    def settle(self, id: HandoffId) -> list[ReaderAction]:
        """Return ReadsEndedEvent for an ended attempt if none of its bytes can land any more.
        Otherwise return nothing.
        """
        if self._landing.get(id) != 0:
            return []
        del self._landing[id]
        return [ReadsEndedEvent(id)]
