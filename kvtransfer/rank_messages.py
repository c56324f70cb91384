"""Messages from rank 0's transfer thread to the followers of its node, and their replies.

Each is the body of a job for all followers (engine/ranks/messages.py), which gets one reply. Rank 0
numbers consumers and links, and may reuse a number after StopTransfer.
"""

from typing import Any, TypeAlias

import msgspec

from kvtransfer.backends.base import PoolRegion
from kvtransfer.messages import HandoffId
from kvtransfer.pairing import PairHello
from kvtransfer.ports import TablePages

MOST_PAGES = 4096  # of one message
MOST_BYTES = 96 << 10  # of the Hello in one OpenRankLink


class StartTransfer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Serve this rank's pages, and read into them. Ends an earlier StartTransfer. The reply is a
    TransferStarted.

    Attributes:
        config: TransferConfig as JSON.
        tls: whether the node's pair streams are encrypted.
    """

    config: bytes
    tls: bool
    instance: int


class TransferStarted(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    region: PoolRegion


class StopTransfer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close all links and stop serving pages."""


class OfferPaths(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Admit a consumer. The reply has the DataPaths that this rank offers it."""

    consumer: int


class DismissConsumer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    consumer: int


class PublishPages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Let a consumer read these pages. At most MOST_PAGES, int32."""

    consumer: int
    pages: bytes


class WithdrawRankPages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    consumer: int
    pages: bytes


class PollPaths(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """See PageProducer.poll."""


class OpenRankLink(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Connect to the ranks of a producer over one backend. The reply is the LinkUp.

    Attributes:
        hello: Hello of the producer, with the paths of that backend only.
    """

    link: int
    backend: str
    hello: PairHello


class ReadRankPages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read this rank's part of pages, see StartRead. The reply is the ReadEnded.

    Attributes:
        source_pages, destination_pages: int32, at most MOST_PAGES each.
    """

    link: int
    handoff: HandoffId
    source_pages: bytes
    destination_pages: bytes
    spans: tuple[TablePages, ...]


class CloseRankLink(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close a link. The reply comes when no byte can land any more."""

    link: int
    reason: str


RankMessage: TypeAlias = (
    StartTransfer
    | StopTransfer
    | OfferPaths
    | DismissConsumer
    | PublishPages
    | WithdrawRankPages
    | PollPaths
    | OpenRankLink
    | ReadRankPages
    | CloseRankLink
)

encode = msgspec.msgpack.Encoder().encode
decode: "msgspec.msgpack.Decoder[Any]" = msgspec.msgpack.Decoder(RankMessage)
