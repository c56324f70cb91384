"""Messages between a node's engine thread and its transfer thread: commands to it, events from it.

The engine thread counts the holders of all pages. Each command that lets the transfer thread use
pages is matched by exactly one event that returns them: GrantCommand by ReadsEndedEvent,
OpenedEvent by ClosedEvent (which ends every PublishCommand of that hand-off).

A consumer chooses its ids and may reuse one. Therefore the producer's engine identifies a hand-off
by a local serial number, new for every OpenedEvent, so a command about an ended hand-off never
affects another.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.request import Remaining
from common.requests.namespace import WeightsId
from kvtransfer.messages import (
    CancelHandoff,
    HandoffAdmitted,
    HandoffId,
    InvalidatePrefix,
    SampledOutput,
    Source,
)

Ints = NDArray[np.int32]


STATE, PIECES = -1, -2  # used instead of a table index: recurrent state, pieces of weights


class TablePages(NamedTuple):
    """The number of consecutive pages of a read that belong to one table, or to PIECES."""

    table: int
    num_pages: int


def tables_of(spans: Sequence[TablePages], num_pages: int) -> list[int]:
    """Return the table of each page of a read. Pages after the spans belong to the state."""
    tables = [table for table, number in spans for _ in range(number)]
    return tables + [STATE] * (num_pages - len(tables))


@dataclass(frozen=True, slots=True, eq=False)
class PagesToRead:
    """The pages of one read: source page i is read into destination page i.

    The pages of the recurrent state are last in both lists, whose lengths differ if the nodes have
    different numbers of state pages.
    """

    source: Ints
    destination: Ints
    spans: tuple[TablePages, ...]  # without the state

    def by_table(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield (table, source pages, destination pages). The state comes last, as STATE."""
        start = 0
        for table, num_pages in self.spans:
            some = slice(start, start + num_pages)
            yield table, self.source[some], self.destination[some]
            start += num_pages
        if len(self.source) > start:
            yield STATE, self.source[start:], self.destination[start:]


# Commands of a consumer's engine (decode node). CancelHandoff is one, too.


class OpenCommand(msgspec.Struct, frozen=True):
    """A request to `producer`, an instance, for `source`. FailedEvent follows if it is not paired.

    Attributes:
        weights: weight version of this node.
    """

    id: HandoffId
    producer: int
    weights: WeightsId
    remaining: Remaining
    source: Source


class GrantCommand(msgspec.Struct, frozen=True):
    """The destination pages, in the order of `PageTables.handed_over`. WEIGHTS has one page for
    each piece. The engine holds the pages for "read" until ReadsEndedEvent. A running request and a
    PREFIX have `PageTables.room_pages` pages, of which their tokens use the first ones.
    """

    id: HandoffId
    prefix_tokens: int
    destination_pages: Ints
    room_tokens: int = 0  # LIVE


class InvalidateCommand(msgspec.Struct, frozen=True):
    """Send this message to `producer`, if still paired."""

    producer: int
    message: InvalidatePrefix


# Events to a consumer's engine. HandoffAdmitted is one, too.

LINK_PATHS = ("nvlink", "cuda_ipc", "rdma", "cma", "tcp")


class LinkMember(msgspec.Struct, frozen=True, array_like=True):
    """One member of a link: what one local rank reads from one rank of the producer."""

    rank: int
    producer_rank: int
    path: str
    gib_per_s: float  # proved rate


class ProducerUp(msgspec.Struct, frozen=True):
    """A producer is paired and its link is proved.

    Attributes:
        piece_bytes: largest piece of weights that fits into a page of both nodes.
        members: members of the link, if it has several.
    """

    instance: int
    address: str
    path: str  # one of LINK_PATHS
    gib_per_s: float
    piece_bytes: int
    members: tuple[LinkMember, ...] = ()


class ProducerRate(msgspec.Struct, frozen=True):
    """A new measurement of the link to a paired producer."""

    instance: int
    address: str
    gib_per_s: float


class ProducerDown(msgspec.Struct, frozen=True):
    """A producer is lost. FailedEvent follows for each open hand-off with it."""

    instance: int
    address: str
    reason: str


class FirstTokenEvent(msgspec.Struct, frozen=True):
    """The first token. Precedes the pages, at most once per id."""

    id: HandoffId
    output: SampledOutput
    first_ready: float = 0.0  # time.monotonic() when the first range was ready


class CompletedEvent(msgspec.Struct, frozen=True):
    """A completed hand-off: all pages have landed, and the producer confirmed that they were valid
    throughout. The request may join a batch.
    """

    id: HandoffId
    landed: float = 0.0  # time.monotonic() when the last page had landed
    num_tokens: int = 0  # tokens with KV. A PREFIX may have fewer than requested


class FailedEvent(msgspec.Struct, frozen=True):
    """A failed attempt, without its pages. Only ReadsEndedEvent may follow for this id."""

    id: HandoffId
    reason: str
    retryable: bool  # False: any other producer would reject it too
    engine_died: bool = False  # the producer's engine died, possibly while computing it
    may_return: bool = False  # the producer's stream ended, and may be reopened
    retry_after_s: float = 0.0  # above 0.0: retry after this time, because the queue is too long


class ReadsEndedEvent(msgspec.Struct, frozen=True):
    """The end of all reads of an attempt: no byte can land any more, so the engine drops its "read"
    hold. Exactly once per grant.
    """

    id: HandoffId


# Commands of a producer's engine


class AdmittedCommand(msgspec.Struct, frozen=True):
    serial: int
    compute_tokens: int
    queued_tokens: int


class PublishCommand(msgspec.Struct, frozen=True):
    """A token range [start, end) whose KV is final in these pages, in the order of
    `PageTables.spans`. The engine holds the pages for "publication" until ClosedEvent. The ranges
    of a hand-off are consecutive, from prefix_tokens on.
    """

    serial: int
    start: int
    end: int
    pages: Ints
    last: bool
    output: SampledOutput | None = None  # as in PagesReady


class FailCommand(msgspec.Struct, frozen=True):
    """The producer's decision to fail a hand-off. ClosedEvent follows."""

    serial: int
    reason: str
    retryable: bool
    retry_after_s: float = 0.0  # above 0.0: retry after this time, because the queue is too long


# Events to a producer's engine. InvalidatePrefix is one, too. Its report may be wrong.


class OpenedEvent(msgspec.Struct, frozen=True):
    """A consumer's request for `source`.

    Attributes:
        id: used in logs.
        weights: weight version of the consumer.
    """

    serial: int
    id: HandoffId
    weights: WeightsId
    remaining: Remaining
    source: Source


class GrantedEvent(msgspec.Struct, frozen=True):
    serial: int
    prefix_tokens: int
    room_tokens: int = 0  # LIVE: limit of the tokens to publish
    gib_per_s: float = 0.0  # LIVE: rate of the consumer's link, reported by it; 0.0: unknown


class ClosedEvent(msgspec.Struct, frozen=True):
    """The end of a hand-off at the producer. The engine drops its "publication" holds and stops
    computing. Exactly once per OpenedEvent, and the last event with its serial.
    """

    serial: int
    id: HandoffId  # used in logs
    completed: bool
    reason: str


# Commands of any engine


class SetWeightVersion(msgspec.Struct, frozen=True):
    """A new weight version. All pairs end, and the node pairs again with nodes of that version."""

    weights: WeightsId


class ClosePairs(msgspec.Struct, frozen=True):
    """End all pairs, and pair with no node until OpenPairs.

    Attributes:
        done: completes when no byte can land any more and no consumer can read.
    """

    done: Future[None]


class OpenPairs(msgspec.Struct, frozen=True):
    """Pair again. The pages are already served again, at the same addresses."""


ConsumerCommand: TypeAlias = OpenCommand | GrantCommand | CancelHandoff | InvalidateCommand
ConsumerEvent: TypeAlias = (
    ProducerUp
    | ProducerRate
    | ProducerDown
    | HandoffAdmitted
    | FirstTokenEvent
    | CompletedEvent
    | FailedEvent
    | ReadsEndedEvent
)
ProducerCommand: TypeAlias = AdmittedCommand | PublishCommand | FailCommand
ProducerEvent: TypeAlias = OpenedEvent | GrantedEvent | ClosedEvent | InvalidatePrefix
NodeCommand: TypeAlias = (
    ConsumerCommand | ProducerCommand | SetWeightVersion | ClosePairs | OpenPairs
)
NodeEvent: TypeAlias = ConsumerEvent | ProducerEvent


class ConsumerCommands(Protocol):
    """Sends commands about hand-offs that this node receives. Never blocks."""

    def post(self, command: ConsumerCommand) -> None: ...


class ProducerCommands(Protocol):
    """Sends commands about hand-offs that this node gives. Never blocks."""

    def post(self, command: ProducerCommand) -> None: ...


class TransferPort(Protocol):
    """The transfer thread as the engine thread sees it, for a node that is consumer and producer.
    Never blocks.
    """

    def post(self, command: NodeCommand) -> None: ...

    def take(self) -> list[NodeEvent]: ...
