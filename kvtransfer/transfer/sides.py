"""The transfer side of a node, which is consumer on some pair streams and producer on others.

Both share one counter of streams, so their numbers never collide, and are otherwise independent.
While the memory of the pages is released, neither has a pair (`PageAccess`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from common.config import TransferConfig
from common.errors import EngineFault, FailedPrecondition, LayoutMismatch, ServingError
from common.page_tables import PageTables
from common.requests.namespace import WeightsId
from kvtransfer.frontend_messages import EndStream, LocalHello, PairOpened
from kvtransfer.messages import AnyMessage, CancelHandoff
from kvtransfer.pairing import OTHER_WEIGHTS, PairHello, compare, lasts
from kvtransfer.ports import (
    ClosePairs,
    GrantCommand,
    InvalidateCommand,
    NodeCommand,
    OpenCommand,
    OpenPairs,
    SetWeightVersion,
)
from kvtransfer.protocol.consumer import ConsumerEnd
from kvtransfer.protocol.producer import ProducerEnd
from kvtransfer.protocol.progress import EventOutlet, earliest
from kvtransfer.transfer.consumer import ConsumerSide, ReadMetrics
from kvtransfer.transfer.paths import PageBytes, PageChecksums, PathOffers, TransferPaths
from kvtransfer.transfer.producer import ProducerSide

RELEASED = "the memory of its pages is released"
_CLOSE_S = 30.0  # for links to end, and for registrations of all ranks
_OPEN_S = 120.0  # for registrations of all ranks


class TransferSides:
    """The consumer's and the producer's side of one node. Transfer thread only.

    Args:
        hello: Hello of this node, without paths.
    """

    def __init__(
        self,
        hello: PairHello,
        consumer: ConsumerSide,
        publisher: ProducerSide,
        outlet: EventOutlet,
    ) -> None:
        self._hello = hello
        self._consumer = consumer
        self._publisher = publisher
        self._outlet = outlet
        self._of_stream: dict[int, ConsumerSide | ProducerSide] = {}
        self._refused: set[int] = set()  # rejected streams, which neither side knows
        self._closing: Future[None] | None = None  # `done` of ClosePairs, until OpenPairs

    def start(self) -> None:
        self._outlet.send(LocalHello(self._hello))

    def opened(self, opening: PairOpened, now: float) -> None:
        stream, hello = opening.stream, opening.hello
        side = self._consumer if opening.as_consumer else self._publisher
        refusal = self._refusal(opening)
        if refusal is not None:
            self._refused.add(stream)
            self._outlet.send(refusal)
            return
        self._of_stream[stream] = side
        side.opened(stream, hello, now)

    def _refusal(self, opening: PairOpened) -> EndStream | None:
        """Return the end of a stream whose nodes may not pair now, or None."""
        stream, hello = opening.stream, opening.hello
        if self._closing is not None:
            return EndStream(stream, RELEASED, refused=False)
        lasting = lasts(self._hello, hello)
        try:
            compare(self._hello, hello)
            lasting = True
            if opening.as_consumer:
                self._consumer.check(hello)
        except LayoutMismatch as mismatch:
            return EndStream(stream, str(mismatch), lasting)
        return None

    def _compute_with(self, weights: WeightsId) -> None:
        """Announce this weight version from now on. Ends pairs with nodes of another version."""
        hello = self._hello.with_weights(weights)
        if hello != self._hello:
            self._hello = self._publisher.hello = hello
            self._outlet.send(LocalHello(hello))
            self._end_pairs(OTHER_WEIGHTS)

    def _end_pairs(self, reason: str) -> None:
        self._consumer.end_pairs(reason)
        self._publisher.end_pairs(reason)

    def closed(self, stream: int, reason: str, engine_died: bool = False) -> None:
        if stream in self._refused:
            self._refused.remove(stream)
        else:
            self._of_stream.pop(stream).closed(stream, reason, engine_died)

    def received(self, stream: int, message: AnyMessage, now: float) -> None:
        if stream not in self._refused:
            self._of_stream[stream].received(stream, message, now)

    def command(self, command: NodeCommand, now: float) -> None:
        match command:
            case OpenCommand() | GrantCommand() | CancelHandoff() | InvalidateCommand():
                self._consumer.command(command, now)
            case SetWeightVersion(weights):
                self._compute_with(weights)
            case ClosePairs(done):
                self._closing = done
                self._end_pairs(RELEASED)
            case OpenPairs():
                self._closing = None
            case _:
                self._publisher.command(command, now)

    def tick(self, now: float, *, engine_moves: bool) -> None:
        self._consumer.tick(now, engine_moves=engine_moves)
        self._publisher.tick(now, engine_moves=engine_moves)
        # The frontend reports the end of each stream. After that, neither side is called for it.
        is_closed = not self._of_stream and not self._consumer.has_links
        if self._closing is not None and is_closed and not self._closing.done():
            self._closing.set_result(None)

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
) -> Callable[[EventOutlet, Callable[[], None]], TransferSides]:
    """Return a function that creates both sides for a TransferThread.

    Args:
        contents: creates access to this process' pages, for checksums.
        max_unconsumed_tokens: see ProducerSide.
    """

    def made(outlet: EventOutlet, wake: Callable[[], None]) -> TransferSides:
        consumer = ConsumerSide(
            ConsumerEnd(config, tables),
            hello,
            paths.opener,
            paths.backends,
            outlet,
            wake,
            reads,
            PageChecksums(contents(), 0, paths.compared),
        )
        publisher = ProducerSide(
            ProducerEnd(config, tables),
            hello,
            paths.offers,
            outlet,
            wake,
            PageChecksums(contents(), config.checksum_interval, paths.compared),
            max_unconsumed_tokens=max_unconsumed_tokens,
        )
        return TransferSides(hello, consumer, publisher, outlet)

    return made


class PageAccess:
    """Ends and restores transfers of pages, around the release of their memory. One thread at a
    time may use it, but not the transfer thread.

    Args:
        post: sends a command to the transfer thread.
        offers: paths of all ranks.
    """

    def __init__(self, post: Callable[[NodeCommand], None], offers: PathOffers) -> None:
        self._post = post
        self._offers = offers

    def close(self) -> None:
        """End all pairs, and destroy the agents and connections that refer to the pages. Blocks.

        Raises:
            FailedPrecondition: it took too long. Nothing has changed.
        """
        done: Future[None] = Future()
        self._post(ClosePairs(done))
        try:
            done.result(_CLOSE_S)
        except TimeoutError:
            self._post(OpenPairs())
            raise FailedPrecondition(
                f"links to other nodes have not ended within {_CLOSE_S:g} s"
            ) from None
        _wait(self._offers.close(), _CLOSE_S)

    def open(self) -> None:
        """Serve the pages again, and pair again. Blocks.

        Raises:
            ServingError: the pages cannot be served. Nothing has changed.
        """
        try:
            _wait(self._offers.open(), _OPEN_S)
        except ServingError:
            _wait(self._offers.close(), _CLOSE_S)
            raise
        self._post(OpenPairs())


def _wait(futures: Sequence[Future[Any]], timeout_s: float) -> None:
    """Wait until all are done. Raises the error of a rank, or EngineFault on timeout."""
    for each in futures:
        try:
            each.result(timeout_s)
        except TimeoutError as error:
            raise EngineFault(f"a rank has not replied within {timeout_s:g} s") from error
