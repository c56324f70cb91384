"""A node's transfer side that reads on some pair streams and serves reads on others.

Streams of both kinds share one counter, so their numbers never collide. The two sides are
independent.
"""

from collections.abc import Callable
from typing import cast

from common.config import TransferConfig
from common.page_tables import PageTables
from kvtransfer.frontend_messages import PairOpened
from kvtransfer.messages import AnyMessage
from kvtransfer.pairing import PairHello
from kvtransfer.ports import (
    CancelCommand,
    ConsumerEvent,
    GrantCommand,
    InvalidateCommand,
    NodeCommand,
    NodeEvent,
    OpenCommand,
    ProducerEvent,
    SetWeightVersion,
)
from kvtransfer.protocol.consumer import ConsumerEnd
from kvtransfer.protocol.liveness import earliest
from kvtransfer.protocol.producer import ProducerEnd
from kvtransfer.transfer.consumer import ConsumerSide, ReadMetrics
from kvtransfer.transfer.page_bytes import PageBytes, PageChecksums
from kvtransfer.transfer.paths import TransferPaths
from kvtransfer.transfer.producer import ProducerSide
from kvtransfer.transfer.thread import EventOutlet


class TransferSides:
    """The consumer's and the producer's side of one node. Transfer thread only."""

    def __init__(self, consumer: ConsumerSide, publisher: ProducerSide) -> None:
        self._consumer = consumer
        self._publisher = publisher
        self._of_stream: dict[int, ConsumerSide | ProducerSide] = {}

    def start(self) -> None:
        self._consumer.start()
        self._publisher.start()

    def opened(self, opening: PairOpened, now: float) -> None:
        side = self._consumer if opening.as_consumer else self._publisher
        self._of_stream[opening.stream] = side
        side.opened(opening, now)

    def closed(self, stream: int, reason: str, engine_died: bool = False) -> None:
        self._of_stream.pop(stream).closed(stream, reason, engine_died)

    def received(self, stream: int, message: AnyMessage, now: float) -> None:
        self._of_stream[stream].received(stream, message, now)

    def command(self, command: NodeCommand, now: float) -> None:
        match command:
            case OpenCommand() | GrantCommand() | CancelCommand() | InvalidateCommand():
                self._consumer.command(command, now)
            case SetWeightVersion(weights):
                self._consumer.compute_with(weights)
                self._publisher.compute_with(weights)
            case _:
                self._publisher.command(command, now)

    def tick(self, now: float, *, engine_moves: bool) -> None:
        self._consumer.tick(now, engine_moves=engine_moves)
        self._publisher.tick(now, engine_moves=engine_moves)

    def next_deadline(self) -> float | None:
        return earliest((self._consumer.next_deadline(), self._publisher.next_deadline()))

    def close(self) -> None:
        self._consumer.close()
        self._publisher.close()


def both_sides(
    config: TransferConfig,
    tables: PageTables,
    hello: PairHello,
    contents: Callable[[], PageBytes],
    paths: TransferPaths,
    reads: ReadMetrics,
    *,
    max_unconsumed_tokens: int,
) -> Callable[[EventOutlet[NodeEvent], Callable[[], None]], TransferSides]:
    """Return a function that makes both sides for a TransferThread.

    Args:
        contents: makes access to the pages of this process, which are sampled and compared.
        reads: counts every read.
        max_unconsumed_tokens: see ProducerSide.
    """

    def made(outlet: EventOutlet[NodeEvent], wake: Callable[[], None]) -> TransferSides:
        consumer = ConsumerSide(
            ConsumerEnd(config, tables),
            hello,
            paths.opener,
            paths.backends,
            cast(EventOutlet[ConsumerEvent], outlet),  # the outlet takes the events of both
            wake,
            reads,
            PageChecksums(contents(), 0, paths.compared),
        )
        publisher = ProducerSide(
            ProducerEnd(config, tables),
            hello,
            paths.offers,
            cast(EventOutlet[ProducerEvent], outlet),
            wake,
            PageChecksums(contents(), config.checksum_interval, paths.compared),
            max_unconsumed_tokens=max_unconsumed_tokens,
        )
        return TransferSides(consumer, publisher)

    return made
