"""What the two ends ask of the transfer thread, to be carried out in the order given.

A link is named by the stream it serves: a stream belongs to one owner instance and its number is
never used again, so no read can meet another instance than the one it was meant for (rule 10).
"""

from typing import TypeAlias

import msgspec

from kvtransfer.messages import AnyMessage, HandoffId
from kvtransfer.ports import Held, Ints, OwnerEvent, ReaderEvent


class Send(msgspec.Struct, frozen=True):
    stream: int
    message: AnyMessage


class EndStream(msgspec.Struct, frozen=True):
    """Ends the stream. The end has forgotten it already and expects nothing more of it."""

    stream: int
    reason: str
    refused: bool  # the peer has broken the protocol: trying again at once is useless


class OpenLink(msgspec.Struct, frozen=True):
    """Connect to the owner of this stream. Answered by one link_up, or by link_closed."""

    stream: int


class CloseLink(msgspec.Struct, frozen=True):
    """Answered by link_closed, once no byte can land through the link any more."""

    stream: int
    reason: str


class StartRead(msgspec.Struct, frozen=True):
    """Read source_pages[i] of the stream's owner into destination_pages[i]. Reads of one link end
    in the order in which they were started, by read_ended or all the rest by link_closed."""

    stream: int
    id: HandoffId
    source_pages: Ints
    destination_pages: Ints


class Expect(msgspec.Struct, frozen=True):
    """Reads into these pages are soon to be started, through the link of this stream, and somebody
    stands still for them."""

    stream: int
    destination_pages: Ints


class Confirm(msgspec.Struct, frozen=True):
    """The owner held all that was read: tell the engine `held`, unless one of these pages is not
    what its owner said. Then the attempt is lost, and the link of this stream is not trusted."""

    stream: int
    held: Held
    sums: tuple[tuple[int, int], ...]  # local page, checksum


class Expose(msgspec.Struct, frozen=True):
    """Let the reader of this stream read these pages, before it is told of them."""

    id: HandoffId
    stream: int
    pages: Ints


class Withdraw(msgspec.Struct, frozen=True):
    """End every Expose of this id."""

    id: HandoffId


ReaderAction: TypeAlias = (
    Send | EndStream | OpenLink | CloseLink | StartRead | Expect | Confirm | ReaderEvent
)
OwnerAction: TypeAlias = Send | EndStream | Expose | Withdraw | OwnerEvent
