"""The links that a reader reads through, one for each of its streams, and when nothing of an
attempt can land any more.

A closing link outlives its stream. Like the end that owns it, pure: it returns what to carry out.
"""

from collections.abc import Container

from common.errors import EngineFault
from kvtransfer.messages import HandoffId
from kvtransfer.ports import ReadsEnded
from kvtransfer.protocol.actions import CloseLink, OpenLink, ReaderAction, StartRead
from kvtransfer.protocol.deadlines import Deadlines
from kvtransfer.protocol.link_reads import LinkReads, LinkState, Read

# Longest until a link is up, from the moment it is opened or told to close: several paths of 5 s
# to connect and 5 s to probe.
LINK_S = 30.0


class ReaderLinks:
    """By stream. It knows what is read for whom, not what becomes of that."""

    def __init__(self) -> None:
        self._links: dict[int, LinkReads] = {}
        self._landing: dict[HandoffId, int] = {}  # posted reads, from grant to ReadsEnded
        self._deadlines: Deadlines[int] = Deadlines()

    @property
    def num_reads(self) -> int:
        """Reads given to links and not over."""
        return sum(self._landing.values())

    # Links ----------------------------------------------------------------------------------------

    def open(self, stream: int, now: float) -> OpenLink:
        """The first one of a stream, or the successor of one that has closed."""
        self._links.setdefault(stream, LinkReads()).state = LinkState.OPENING
        self._deadlines.set(stream, now + LINK_S)
        return OpenLink(stream)

    def proved(self, stream: int) -> bool:
        """Whether it was awaited: what was told to close meanwhile stays so."""
        link = self._links[stream]
        if link.state is not LinkState.OPENING:
            return False
        link.state = LinkState.UP
        self._deadlines.drop(stream)
        return True

    def close(self, stream: int, reason: str, now: float) -> CloseLink:
        """Another is opened once it has closed."""
        self._links[stream].state = LinkState.CLOSING
        self._deadlines.set(stream, now + LINK_S)
        return CloseLink(stream, reason)

    def stream_over(self, stream: int, reason: str) -> list[ReaderAction]:
        """Its link, if there is still one, closes for good."""
        self._deadlines.drop(stream)
        if stream not in self._links:
            return []
        self._links[stream].state = LinkState.CLOSING
        return [CloseLink(stream, reason)]

    def gone(self, stream: int) -> None:
        """It has closed for good."""
        del self._links[stream]

    def is_opening(self, stream: int) -> bool:
        return self._links[stream].state is LinkState.OPENING

    def is_up(self, stream: int) -> bool:
        return self._links[stream].state is LinkState.UP

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def take_overdue(self, now: float) -> list[int]:
        """Streams whose link is not up in time."""
        return self._deadlines.take_due(now)

    # Reads ----------------------------------------------------------------------------------------

    def granted(self, id: HandoffId) -> None:
        """From now on its pages may be read into.

        Raises:
            EngineFault: it was granted before.
        """
        if id in self._landing:
            raise EngineFault(f"{id} was granted twice")
        self._landing[id] = 0

    def read(self, stream: int, read: Read) -> list[ReaderAction]:
        self._links[stream].waiting.append(read)
        return self.post(stream)

    def post(self, stream: int) -> list[ReaderAction]:
        """As many of the waiting ones as the link takes."""
        link, actions = self._links[stream], list[ReaderAction]()
        while (read := link.next_to_post()) is not None:
            self._landing[read.id] += 1
            actions.append(StartRead(stream, read.id, read.source_pages, read.destination_pages))
        return actions

    def first_posted(self, stream: int) -> HandoffId | None:
        """Whose read the link has under way."""
        posted = self._links[stream].posted
        return posted[0].id if posted else None

    def read_ended(self, stream: int) -> HandoffId:
        """The first posted read is over; returns whose it was."""
        read = self._links[stream].posted.popleft()
        self._landing[read.id] -= 1
        return read.id

    def closed(self, stream: int, going_on: Container[HandoffId]) -> list[HandoffId]:
        """No byte can land any more through this link. Reads that it had not ended wait for its
        successor if their attempts go on (rule 11); returns those of others."""
        link, over = self._links[stream], []
        for read in reversed(link.closed()):
            self._landing[read.id] -= 1
            if read.id in going_on:
                link.waiting.appendleft(read)
            else:
                over.append(read.id)
        return over

    def forget(self, stream: int, id: HandoffId) -> None:
        """The attempt is over: what of it waits is not read."""
        if stream in self._links:
            self._links[stream].forget(id)

    def settle(self, id: HandoffId) -> list[ReaderAction]:
        """The end of an attempt that is over, once none of its bytes can land any more."""
        if self._landing.get(id) != 0:
            return []
        del self._landing[id]
        return [ReadsEnded(id)]
