"""Actions of the two protocol ends. The transfer thread carries them out in the order given.

A link is named by the stream it serves. A stream belongs to one producer instance and its number is
never reused, so no read can reach another instance than the intended one (rule 10).
"""

from typing import NamedTuple, TypeAlias

import msgspec

from kvtransfer.messages import AnyMessage, HandoffId
from kvtransfer.ports import CompletedEvent, ConsumerEvent, Ints, ProducerEvent, TablePages


class SendMessage(msgspec.Struct, frozen=True):
    stream: int
    message: AnyMessage


class EndStream(msgspec.Struct, frozen=True):
    """A request to end a stream. The state machine has already dropped it and ignores further
    input about it.
    """

    stream: int
    reason: str
    refused: bool  # the peer has broken the protocol: an immediate retry is useless


class OpenLink(msgspec.Struct, frozen=True):
    """A request to connect to the producer of this stream. The response is one link_up or
    link_closed.
    """

    stream: int


class CloseLink(msgspec.Struct, frozen=True):
    """A request to close the link. The response is link_closed, when no byte can land any more."""

    stream: int
    reason: str


class StartRead(msgspec.Struct, frozen=True):
    """A read of pages of the stream's producer into pages of this node.

    Page i of the tables is read into page i. The pages of the state follow in both lists. Their
    numbers differ if the two nodes have different numbers of pages for a state.

    Reads of one link end in the order in which they were started: each by read_ended, or all the
    rest by link_closed.
    """

    stream: int
    id: HandoffId
    source_pages: Ints
    destination_pages: Ints
    spans: tuple[TablePages, ...]


class ExpectPages(msgspec.Struct, frozen=True):
    """Advance notice of reads into these pages through the link of this stream, for which a request
    is stopped.
    """

    stream: int
    destination_pages: Ints


class PageSum(NamedTuple):
    """The checksum of a page that was read, as its producer published it."""

    page: int
    table: int
    checksum: int


class ConfirmRead(msgspec.Struct, frozen=True):
    """The end of a read whose pages the producer held throughout. The engine gets `held`, unless a
    page does not match its producer's checksum. Then the attempt is lost, and the link of this
    stream is closed.
    """

    stream: int
    held: CompletedEvent
    sums: tuple[PageSum, ...]


class ExposePages(msgspec.Struct, frozen=True):
    """Permission for the consumer of this stream to read these pages. Given before they are
    announced, by the next PagesReady.
    """

    id: HandoffId
    stream: int
    pages: Ints
    spans: tuple[TablePages, ...]  # in the order of the pages. The state follows.


class WithdrawPages(msgspec.Struct, frozen=True):
    """The end of every ExposePages of this id."""

    id: HandoffId


ConsumerAction: TypeAlias = (
    SendMessage
    | EndStream
    | OpenLink
    | CloseLink
    | StartRead
    | ExpectPages
    | ConfirmRead
    | ConsumerEvent
)
ProducerAction: TypeAlias = SendMessage | EndStream | ExposePages | WithdrawPages | ProducerEvent
