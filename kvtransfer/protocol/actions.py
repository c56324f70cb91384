"""Actions that the state machines of consumer and producer return. The transfer thread carries them
out in order. It sends SendMessage and EndStream to the frontend, and events to the engine thread,
both through EventOutlet.

A link is named by its stream. A stream belongs to one producer instance and its number is never
reused, so a read never reaches another instance than intended (rule 10).
"""

from typing import NamedTuple, TypeAlias

import msgspec

from kvtransfer.frontend_messages import EndStream, SendMessage
from kvtransfer.messages import HandoffId
from kvtransfer.ports import (
    CompletedEvent,
    ConsumerEvent,
    Ints,
    PagesToRead,
    ProducerEvent,
    TablePages,
)


class OpenLink(msgspec.Struct, frozen=True):
    """Connects a link to the producer of this stream. Answered by one link_up or link_closed."""

    stream: int


class CloseLink(msgspec.Struct, frozen=True):
    """Closes the link. Answered by link_closed, when no byte can land any more."""

    stream: int
    reason: str


class StartRead(msgspec.Struct, frozen=True):
    """Reads pages of the stream's producer into local pages.

    Reads of one link end in the order in which they started. Each ends by read_ended, or all
    remaining ones by link_closed.
    """

    stream: int
    id: HandoffId
    pages: PagesToRead


class ExpectPages(msgspec.Struct, frozen=True):
    """Announces pages that the link of this stream will read into, while a migrating request is
    stopped for the read.
    """

    stream: int
    destination_pages: Ints


class PageSum(NamedTuple):
    """The checksum of a page that was read, as its producer published it."""

    page: int
    table: int
    checksum: int


class ConfirmRead(msgspec.Struct, frozen=True):
    """Completes a hand-off whose pages the producer held throughout. The engine gets `held`, unless
    a page fails its checksum. Then the attempt fails, and the link of this stream is closed.
    """

    stream: int
    held: CompletedEvent
    sums: tuple[PageSum, ...]


class ExposePages(msgspec.Struct, frozen=True):
    """Lets the stream's consumer read these pages. Precedes the PagesReady that announces them."""

    id: HandoffId
    stream: int
    pages: Ints
    spans: tuple[TablePages, ...]  # in the order of the pages. The state follows


class WithdrawPages(msgspec.Struct, frozen=True):
    """Undoes every ExposePages of this id."""

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
