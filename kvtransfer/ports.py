"""Messages between a node's engine thread and its transfer thread.

All pages are counted on the engine thread. For every command that gives the transfer thread the use
of pages, it returns them with exactly one event: GrantCommand -> ReadsEndedEvent, OpenedEvent ->
ClosedEvent (which ends every PublishCommand of that hand-off).

A consumer chooses its ids, and may reuse one. So a producer's engine identifies a hand-off by a
serial of this node, new for every OpenedEvent. A command about an ended hand-off then never affects
another.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.request import Remaining
from common.requests.logprobs import Logprobs
from common.requests.namespace import Namespace, WeightsId
from common.requests.timeline import PrefillTimes
from kvtransfer.messages import HandoffId, Source

Ints = NDArray[np.int32]


STATE, PIECES = -1, -2  # in the place of a table: the state, and pieces of weights


class TablePages(NamedTuple):
    """The number of pages of a read that belong to one table, or that have PIECES."""

    table: int
    num_pages: int


def tables_of(spans: Sequence[TablePages], num_pages: int) -> list[int]:
    """Return the table of each page of a read. Pages behind the spans are those of the state."""
    tables = [table for table, number in spans for _ in range(number)]
    return tables + [STATE] * (num_pages - len(tables))


# Commands of a consumer's engine (decode node) ---------------------------------------------------


class OpenCommand(msgspec.Struct, frozen=True):
    """A request to `producer`, a paired instance, for `source`. FailedEvent follows if the
    producer is gone.

    weights: that this node computes with.
    """

    id: HandoffId
    producer: int
    weights: WeightsId
    remaining: Remaining
    source: Source


class GrantCommand(msgspec.Struct, frozen=True):
    """Destination pages for the tables of `PageTables.handed_over`, table after table. WEIGHTS has
    one page for each piece. The engine holds them for "read" until ReadsEndedEvent. A running
    request and a PREFIX have `PageTables.room_pages` pages. Their tokens use the first ones.
    """

    id: HandoffId
    prefix_tokens: int
    destination_pages: Ints
    room_tokens: int = 0  # LIVE


class CancelCommand(msgspec.Struct, frozen=True):
    """Cancellation of an attempt in any state. Neither CompletedEvent nor FailedEvent follows.
    ReadsEndedEvent does if it was granted.
    """

    id: HandoffId
    reason: str


class InvalidateCommand(msgspec.Struct, frozen=True):
    """A report to `producer`, if it is still paired, that KV of these tokens, which it gave, led to
    NaN or Inf logits.
    """

    producer: int
    token_ids: Ints
    namespace: Namespace


# Events to a consumer's engine -------------------------------------------------------------------


class LinkMember(msgspec.Struct, frozen=True, array_like=True):
    """The part of a link that one rank reads from one rank of the producer."""

    rank: int
    producer_rank: int
    path: str
    gib_per_s: float  # as proved


class ProducerUp(msgspec.Struct, frozen=True):
    """A paired producer with a proved link.

    piece_bytes: largest pieces of weights that fit into pages of both nodes.
    members: of the link, if it has several.
    """

    instance: int
    address: str
    path: str  # nvlink | cuda_ipc | rdma | cma | tcp
    gib_per_s: float
    piece_bytes: int
    members: tuple[LinkMember, ...] = ()


class ProducerRate(msgspec.Struct, frozen=True):
    """A new measurement of the link to a paired producer."""

    instance: int
    address: str
    gib_per_s: float


class ProducerDown(msgspec.Struct, frozen=True):
    """A lost producer. Every open hand-off with it is reported FailedEvent next."""

    instance: int
    address: str
    reason: str


class QueuedEvent(msgspec.Struct, frozen=True):
    id: HandoffId
    compute_tokens: int
    queued_tokens: int


class FirstTokenEvent(msgspec.Struct, frozen=True):
    """The first token. Comes before the pages have landed, at most once per id."""

    id: HandoffId
    token: int
    first_ready: float = 0.0  # time.monotonic() when the first range was ready
    times: PrefillTimes | None = None  # as the producer measured them
    logprobs: Logprobs | None = None  # as in Ready
    prompt_logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] = ()  # LIVE, as in Ready


class CompletedEvent(msgspec.Struct, frozen=True):
    """A completed hand-off: all pages have landed and the producer held them throughout. The
    request may join a batch.
    """

    id: HandoffId
    landed: float = 0.0  # time.monotonic() when the last page had landed
    num_tokens: int = 0  # with KV; for a PREFIX possibly fewer than were requested


class FailedEvent(msgspec.Struct, frozen=True):
    """A failed attempt, without its pages. A later event about this id can only be
    ReadsEndedEvent."""

    id: HandoffId
    reason: str
    retryable: bool  # False: another producer would refuse it as well
    engine_died: bool = False  # the producer's engine, which may have been computing it
    may_return: bool = False  # the producer may: its stream ended, another one may come
    retry_after_s: float = 0.0  # above 0.0: the producer's queue is too long until then


class ReadsEndedEvent(msgspec.Struct, frozen=True):
    """The end of all reads of this attempt: no byte can land any more, so the engine drops the
    "read" hold. Exactly once per grant.
    """

    id: HandoffId


# Commands of a producer's engine ------------------------------------------------------------------


class QueuedCommand(msgspec.Struct, frozen=True):
    serial: int
    compute_tokens: int
    queued_tokens: int


class PublishCommand(msgspec.Struct, frozen=True):
    """A token range [start, end) that is final in these pages, which are concatenated in the order
    of `PageTables.spans`. The engine holds them for "publication" until ClosedEvent. The ranges
    of one hand-off follow each other, from its prefix_tokens on.
    """

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


class FailCommand(msgspec.Struct, frozen=True):
    """The producer's decision to fail the hand-off. ClosedEvent follows."""

    serial: int
    reason: str
    retryable: bool
    retry_after_s: float = 0.0  # above 0.0: the queue here is too long until then


# Events to a producer's engine -------------------------------------------------------------------


class OpenedEvent(msgspec.Struct, frozen=True):
    """A consumer's request for `source`.

    id: for logs.
    weights: that the consumer computes with.
    """

    serial: int
    id: HandoffId
    weights: WeightsId
    remaining: Remaining
    source: Source


class GrantedEvent(msgspec.Struct, frozen=True):
    serial: int
    prefix_tokens: int
    room_tokens: int = 0  # LIVE: maximum number of published tokens
    gib_per_s: float = 0.0  # LIVE: of the consumer's link, as the consumer reports it; 0.0: unknown


class ClosedEvent(msgspec.Struct, frozen=True):
    """The end of a hand-off at the producer. The engine drops its "publication" holds and stops
    computing it. Exactly once per OpenedEvent, and the last event about its serial.
    """

    serial: int
    id: HandoffId  # for logs
    held: bool  # the consumer has everything
    reason: str


class InvalidateEvent(msgspec.Struct, frozen=True):
    """A consumer's report that KV of these tokens, which this node gave, led to NaN or Inf logits.
    The report may be wrong.
    """

    token_ids: Ints
    namespace: Namespace


# Commands of either's engine --------------------------------------------------------------------


class SetWeightVersion(msgspec.Struct, frozen=True):
    """A new weight version. The node's pairs end, and it pairs with nodes that have the
    same one.
    """

    weights: WeightsId


class ClosePairs(msgspec.Struct, frozen=True):
    """End all pairs, and pair with no node until OpenPairs.

    Attributes:
        done: completes when no byte can land any more, and no consumer has access.
    """

    done: Future[None]


class OpenPairs(msgspec.Struct, frozen=True):
    """Pair again. The node's pages are served again, at the same addresses."""


ConsumerCommand: TypeAlias = OpenCommand | GrantCommand | CancelCommand | InvalidateCommand
ConsumerEvent: TypeAlias = (
    ProducerUp
    | ProducerRate
    | ProducerDown
    | QueuedEvent
    | FirstTokenEvent
    | CompletedEvent
    | FailedEvent
    | ReadsEndedEvent
)
ProducerCommand: TypeAlias = QueuedCommand | PublishCommand | FailCommand
ProducerEvent: TypeAlias = OpenedEvent | GrantedEvent | ClosedEvent | InvalidateEvent
NodeCommand: TypeAlias = (
    ConsumerCommand | ProducerCommand | SetWeightVersion | ClosePairs | OpenPairs
)
NodeEvent: TypeAlias = ConsumerEvent | ProducerEvent


class ConsumerCommands(Protocol):
    """The port for commands about hand-offs that this node receives. Never blocks."""

    def post(self, command: ConsumerCommand) -> None: ...


class ProducerCommands(Protocol):
    """The port for commands about hand-offs that this node gives. Never blocks."""

    def post(self, command: ProducerCommand) -> None: ...


class TransferPort(Protocol):
    """The transfer thread of a node that is consumer and producer, as its engine thread sees it.
    Neither call ever blocks.
    """

    def post(self, command: NodeCommand) -> None: ...

    def take(self) -> list[NodeEvent]: ...
