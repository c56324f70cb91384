"""What crosses between a node's engine thread and its transfer thread.

All pages are counted on the engine thread. The transfer thread answers every command that lends
it pages with exactly one event that gives them back: GrantHandoff -> ReadsEnded,
Opened -> HandoffDropped (which ends every Publish of that hand-off).

A reader chooses its ids, and may use one again. So an owner's engine knows a hand-off by a serial
of this node's own, new for every Opened: what it says about one that is over meets no other.
"""

from typing import Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.request import Remaining
from common.requests.logprobs import Logprobs
from common.requests.namespace import Namespace
from common.requests.timeline import PrefillTimes
from common.requests.weights import WeightsId
from kvtransfer.messages import HandoffId, Source

Ints = NDArray[np.int32]


# Commands of a reader's engine (decode node) ---------------------------------------------------


class OpenHandoff(msgspec.Struct, frozen=True):
    """Ask `owner`, a paired instance, for `source`. Lost follows if it is gone.

    weights: that this node computes with.
    """

    id: HandoffId
    owner: int
    weights: WeightsId
    remaining: Remaining
    source: Source


class GrantHandoff(msgspec.Struct, frozen=True):
    """Destination pages of what `PageTables.handed_over` says, table after table; of WEIGHTS one
    for each piece. The engine holds them for "read" until ReadsEnded. Of a running request, and of
    a PREFIX, there are `PageTables.room_pages`; those that its tokens take are the first ones."""

    id: HandoffId
    prefix_tokens: int
    destination_pages: Ints
    room_tokens: int = 0  # LIVE


class CancelHandoff(msgspec.Struct, frozen=True):
    """Give the attempt up, whatever its state. Neither Held nor Lost follows; ReadsEnded does
    if it was granted."""

    id: HandoffId
    reason: str


class AskToForget(msgspec.Struct, frozen=True):
    """KV of these tokens that `owner` gave made logits that are no numbers. It is told, if it is
    paired still."""

    owner: int
    token_ids: Ints
    namespace: Namespace


# Events to a reader's engine -------------------------------------------------------------------


class OwnerUp(msgspec.Struct, frozen=True):
    """A paired owner with a proved link."""

    owner: int
    address: str
    path: str  # nvlink | cuda_ipc | rdma | cma | tcp
    gib_per_s: float


class OwnerRate(msgspec.Struct, frozen=True):
    """The link of a paired owner has been measured again."""

    owner: int
    address: str
    gib_per_s: float


class OwnerDown(msgspec.Struct, frozen=True):
    """Every hand-off that is open with it is reported Lost next."""

    owner: int
    address: str
    reason: str


class HandoffAdmitted(msgspec.Struct, frozen=True):
    id: HandoffId
    compute_tokens: int
    queued_tokens: int


class FirstToken(msgspec.Struct, frozen=True):
    """Comes before the pages have landed; at most once per id."""

    id: HandoffId
    token: int
    first_ready: float = 0.0  # time.monotonic() when the first range was ready
    times: PrefillTimes | None = None  # as the owner measured them
    logprobs: Logprobs | None = None  # as in Ready
    prompt_logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] = ()  # LIVE, as in Ready


class Held(msgspec.Struct, frozen=True):
    """All pages have landed and the owner held them throughout: the request may join a batch."""

    id: HandoffId
    landed: float = 0.0  # time.monotonic() when the last page had
    num_tokens: int = 0  # that have KV; of a PREFIX fewer, perhaps, than were asked for


class Lost(msgspec.Struct, frozen=True):
    """The attempt is over without its pages. A later event about this id is only ReadsEnded."""

    id: HandoffId
    reason: str
    retryable: bool  # False: another owner would refuse it as well
    engine_died: bool = False  # the owner's, which may have been computing it
    may_return: bool = False  # the owner: its stream is over, another one may come
    retry_after_s: float = 0.0  # above 0.0: the owner's queue is too long, and until when


class ReadsEnded(msgspec.Struct, frozen=True):
    """No byte of this attempt can land any more: drop the "read" hold. Exactly once per grant."""

    id: HandoffId


# Commands of an owner's engine ------------------------------------------------------------------


class Admit(msgspec.Struct, frozen=True):
    serial: int
    compute_tokens: int
    queued_tokens: int


class Publish(msgspec.Struct, frozen=True):
    """Token range [start, end) is final in these pages, as `PageTables.spans` has them, one after
    the other. The engine holds them for "publication" until HandoffDropped; ranges of one hand-off
    follow each other from its prefix_tokens on."""

    serial: int
    start: int
    end: int
    pages: Ints
    last: bool
    first_token: int | None
    times: PrefillTimes | None = None  # with last
    logprobs: Logprobs | None = None  # as in Ready
    prompt_logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] = ()  # LIVE, as in Ready


class FailHandoff(msgspec.Struct, frozen=True):
    """The owner gives the hand-off up. HandoffDropped follows."""

    serial: int
    reason: str
    retryable: bool
    retry_after_s: float = 0.0  # above 0.0: the queue here is too long, and until when


# Events to an owner's engine -------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True):
    """A reader asks for `source`.

    id: for logs.
    weights: that the reader computes with.
    """

    serial: int
    id: HandoffId
    weights: WeightsId
    remaining: Remaining
    source: Source


class Granted(msgspec.Struct, frozen=True):
    serial: int
    prefix_tokens: int
    room_tokens: int = 0  # LIVE: what is published may have so many tokens
    gib_per_s: float = 0.0  # LIVE: of the reader's link, as it says; 0.0: not known


class HandoffDropped(msgspec.Struct, frozen=True):
    """The hand-off is off the owner's books: drop its "publication" holds, compute no more of it.
    Exactly once per Opened, and the last event about its serial."""

    serial: int
    id: HandoffId  # for logs
    held: bool  # the reader has everything
    reason: str


class AskedToForget(msgspec.Struct, frozen=True):
    """A reader says that KV of these tokens which this node gave made logits that are no numbers.
    It may be wrong."""

    token_ids: Ints
    namespace: Namespace


# Commands of either's engine --------------------------------------------------------------------


class ComputesWith(msgspec.Struct, frozen=True):
    """The node has other weights: its pairs end, and it pairs with those that have these."""

    weights: WeightsId


ReaderCommand: TypeAlias = OpenHandoff | GrantHandoff | CancelHandoff | AskToForget
ReaderEvent: TypeAlias = (
    OwnerUp | OwnerRate | OwnerDown | HandoffAdmitted | FirstToken | Held | Lost | ReadsEnded
)
OwnerCommand: TypeAlias = Admit | Publish | FailHandoff
OwnerEvent: TypeAlias = Opened | Granted | HandoffDropped | AskedToForget
NodeCommand: TypeAlias = ReaderCommand | OwnerCommand | ComputesWith
NodeEvent: TypeAlias = ReaderEvent | OwnerEvent


class ReaderCommands(Protocol):
    """Where the hand-offs that a node takes are told of. Never blocks."""

    def post(self, command: ReaderCommand) -> None: ...


class OwnerCommands(Protocol):
    """Where the hand-offs that a node gives are told of. Never blocks."""

    def post(self, command: OwnerCommand) -> None: ...


class NodePort(Protocol):
    """The transfer thread of a node that is reader and owner, as its engine thread sees it. Neither
    call ever blocks."""

    def post(self, command: NodeCommand) -> None: ...

    def take(self) -> list[NodeEvent]: ...
