"""The reads of one link: those that wait, and those posted to it, which may still write.

OPENING -> UP -> CLOSING -> gone, or OPENING again while its stream lives.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.messages import HandoffId
from kvtransfer.ports import Ints

# One in progress and one for the link to continue with. The rest wait here, where the end of their
# attempt removes them at once.
READS_AHEAD = 2


class LinkState(Enum):
    OPENING = "opening"
    UP = "up"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True, eq=False)
class LinkRead:
    id: HandoffId
    source_pages: Ints
    destination_pages: Ints


@dataclass(slots=True)
class LinkReads:
    state: LinkState = LinkState.OPENING
    waiting: deque[LinkRead] = field(default_factory=deque)
    posted: deque[LinkRead] = field(default_factory=deque)  # in the order in which they will end

    def next_to_post(self) -> LinkRead | None:
        """Move a read from waiting to posted, if the link can take one. Returns it, or None."""
        if self.state is not LinkState.UP or len(self.posted) >= READS_AHEAD or not self.waiting:
            return None
        self.posted.append(self.waiting.popleft())
        return self.posted[-1]

    def forget(self, id: HandoffId) -> None:
        """Drop the waiting reads of an attempt. Posted ones cannot be cancelled."""
        self.waiting = deque(read for read in self.waiting if read.id != id)

    def closed(self) -> list[LinkRead]:
        """Remove and return the reads that the closed link had not ended, in order. None can land
        any more.
        """
        unfinished = list(self.posted)
        self.posted.clear()
        return unfinished
