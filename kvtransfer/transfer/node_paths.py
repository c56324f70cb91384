"""The data paths of a node with several ranks, used by rank 0.

Rank 0 has its own paths, and sends jobs to the followers for theirs. A consumer may read pages when
all ranks serve them, and a read ends when all ranks have read.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Protocol, TypeAlias

import msgspec

from common.config import TransferConfig
from common.errors import ConfigError, EngineFault, LayoutMismatch, TransferError
from kvtransfer.backends.base import Ints, PoolRegion
from kvtransfer.messages import HandoffId
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.ports import PIECES, STATE, PagesToRead, TablePages
from kvtransfer.rank_messages import (
    MOST_BYTES,
    MOST_PAGES,
    CloseRankLink,
    DismissConsumer,
    OfferPaths,
    OpenRankLink,
    PollPaths,
    PublishPages,
    ReadRankPages,
    StartTransfer,
    StopTransfer,
    TransferStarted,
    WithdrawRankPages,
    encode,
)
from kvtransfer.transfer.link import (
    LinkClosed,
    LinkUp,
    Notify,
    PageLink,
    ReadEnded,
)
from kvtransfer.transfer.link_group import LinkGroup
from kvtransfer.transfer.paths import LinkOpener, PathOffers, TransferPaths

Replies: TypeAlias = "Future[Sequence[bytes]]"


class Ask(Protocol):
    """Sends a job to all followers. Never blocks."""

    def __call__(self, body: bytes, on_done: Callable[[Replies], None] | None = None) -> Replies:
        """Send `body` and return a Future of the replies, in any order.

        Args:
            on_done: called with the same Future by the thread that receives the replies, never
                within this call.
        """
        ...


START_S = 60.0

_paths: msgspec.msgpack.Decoder[tuple[DataPath, ...]] = msgspec.msgpack.Decoder(
    tuple[DataPath, ...]
)
_started: msgspec.msgpack.Decoder[TransferStarted] = msgspec.msgpack.Decoder(TransferStarted)
_link_up: msgspec.msgpack.Decoder[LinkUp] = msgspec.msgpack.Decoder(LinkUp)
_read_ended: msgspec.msgpack.Decoder[ReadEnded] = msgspec.msgpack.Decoder(ReadEnded)


def start_ranks(
    own: TransferPaths, config: TransferConfig, ask: Ask, *, tls: bool, instance: int
) -> tuple[TransferPaths, tuple[PoolRegion, ...]]:
    """Make all followers serve their pages. Blocks. Returns the paths of the whole node, and the
    followers' pages by rank.

    Args:
        own: paths of rank 0.
        tls: whether the node's pair streams are encrypted.
    Raises:
        ConfigError: a follower cannot serve its pages.
    """
    start = encode(StartTransfer(config.model_dump_json().encode(), tls, instance))
    try:
        replies = ask(start).result(START_S)
    except TimeoutError as error:
        raise ConfigError(f"a rank does not serve its pages within {START_S:.0f} s") from error
    except EngineFault as error:
        raise ConfigError(str(error)) from error
    started = sorted(map(_started.decode, replies), key=lambda each: each.rank)
    num_ranks = 1 + len(started)
    paths = TransferPaths(
        NodeLinks(own.opener, num_ranks, ask),
        NodeOffers(own.offers, num_ranks, ask, start),
        own.backends,
        own.compared,
    )
    return paths, tuple(each.region for each in started)


class NodeOffers:
    """The paths over which all ranks of this node are read.

    Args:
        own: paths of rank 0.
        start: job with which followers serve their pages again.
    """

    def __init__(self, own: PathOffers, num_ranks: int, ask: Ask, start: bytes) -> None:
        self._own = own
        self._num_ranks = num_ranks
        self._ask = ask
        self._start = start
        self._offered: dict[int, Replies] = {}  # by consumer
        self._poll: Future[Any] | None = None

    def prepare(self, consumer: int) -> Sequence[Future[Any]]:
        self._offered[consumer] = self._ask(encode(OfferPaths(consumer)))
        return (*self._own.prepare(consumer), self._offered[consumer])

    def admit(self, consumer: int) -> tuple[DataPath, ...]:
        """Return the paths over which all ranks can be read."""
        paths, asked = list(self._own.admit(consumer)), self._offered[consumer]
        if asked.done() and not asked.exception():
            paths += (path for reply in asked.result() for path in _paths.decode(reply))
        by_name: dict[str, list[DataPath]] = {}
        for path in paths:
            by_name.setdefault(path.backend, []).append(path)
        offered = [each for each in by_name.values() if len(each) == self._num_ranks]
        return tuple(itertools.chain(*offered))

    def dismiss(self, consumer: int) -> None:
        self._own.dismiss(consumer)
        if self._offered.pop(consumer, None) is not None:
            self._ask(encode(DismissConsumer(consumer)))

    def publish(self, consumer: int, pages: Ints) -> Sequence[Future[Any]]:
        self._own.publish(consumer, pages)
        return [
            self._ask(encode(PublishPages(consumer, some.tobytes()))) for some in _in_parts(pages)
        ]

    def withdraw(self, consumer: int, pages: Ints) -> None:
        """Withdraw the pages. Followers do so later. Until then, the consumer may read data that
        others write there, as on a one-sided path, and discards it.
        """
        self._own.withdraw(consumer, pages)
        for some in _in_parts(pages):
            self._ask(encode(WithdrawRankPages(consumer, some.tobytes())))

    def poll(self) -> None:
        self._own.poll()
        if self._poll is None or self._poll.done():
            self._poll = self._ask(encode(PollPaths()))

    def close(self) -> Sequence[Future[Any]]:
        return (*self._own.close(), self._ask(encode(StopTransfer())))

    def open(self) -> Sequence[Future[Any]]:
        return (*self._own.open(), self._ask(self._start))


class NodeLinks:
    """Opens links of all ranks of this node.

    Args:
        own: links of rank 0.
    """

    def __init__(self, own: LinkOpener, num_ranks: int, ask: Ask) -> None:
        self._own = own
        self._num_ranks = num_ranks
        self._ask = ask
        self._numbers = itertools.count()

    def check(self, hello: PairHello) -> None:
        self._own.check(hello)
        # "": for a link that closes at once, because no path is usable.
        for backend in {"", *(path.backend for path in hello.paths)}:
            if len(encode(_brief(hello, backend))) > MOST_BYTES:
                raise LayoutMismatch(
                    f"{hello.peer} cannot pair: {backend} of {len(hello.regions)} ranks takes "
                    f"more than {MOST_BYTES} bytes."
                )

    def open(self, hello: PairHello, backend: str, notify: Notify) -> PageLink:
        opening = OpenRankLink(next(self._numbers), backend, _brief(hello, backend))
        makers: list[Callable[[Notify], PageLink]] = [
            partial(self._own.open, hello, backend),
            partial(FollowersLink, opening, self._ask),
        ]
        return LinkGroup(hello.instance, makers, notify, shares=[1, self._num_ranks - 1])


def _brief(hello: PairHello, backend: str) -> PairHello:
    """Return the part of a Hello that a follower needs to connect."""
    paths = tuple(path for path in hello.paths if path.backend == backend)
    return msgspec.structs.replace(hello, paths=paths, fingerprint={})


@dataclass(slots=True, eq=False)
class _Read:
    ended: ReadEnded  # the parts that have ended, one after the other
    parts: int  # parts not ended yet


class FollowersLink:
    """A link of all followers to the ranks of a producer, see PageLink. It has no deadlines: each
    follower closes its own late links, and an unresponsive follower ends the node.
    """

    deadline: float | None = None

    def __init__(self, opening: OpenRankLink, ask: Ask, notify: Notify) -> None:
        self.producer = opening.hello.instance
        self._number = opening.link
        self._ask = ask
        self._notify = notify
        self._reads: deque[_Read] = deque()
        self._closing: str | None = None  # reason for closing, once requested
        self._closed = threading.Event()
        self._lock = threading.RLock()
        ask(encode(opening), self._opened)

    def post(self, handoff: HandoffId, pages: PagesToRead) -> None:
        parts = list(_parts_of(pages))
        with self._lock:
            if self._closing is not None:
                raise TransferError(f"the link is closed: {self._closing}")
            read = _Read(ReadEnded(handoff), len(parts))
            self._reads.append(read)
            for part in parts:
                lists = part.source.tobytes(), part.destination.tobytes()
                message = ReadRankPages(self._number, handoff, *lists, part.spans)
                self._ask(encode(message), partial(self._ended, read))

    def expect(self, destination_pages: Ints) -> None:
        """No-op: followers do not prepare memory before reads."""

    def expire(self, now: float) -> None:
        """No-op: followers enforce their own deadlines."""

    def close(self, reason: str) -> None:
        with self._lock:
            if self._closing is None:
                self._closing = reason
                self._ask(encode(CloseRankLink(self._number, reason)), self._fenced)

    def join(self, timeout_s: float) -> bool:
        return self._closed.wait(timeout_s)

    # On the thread that receives the replies. Events are sent with the lock released, because a
    # group of links calls this one with its own.

    def _opened(self, asked: Replies) -> None:
        error = asked.exception()
        if error is not None:
            self.close(str(error))
        elif self._closing is None:
            up = [_link_up.decode(reply) for reply in asked.result()]
            slowest = min(up, key=lambda each: each.gib_per_s)
            members = itertools.chain.from_iterable(each.members for each in up)
            in_order = tuple(sorted(members, key=lambda each: (each.rank, each.producer_rank)))
            self._notify(LinkUp(slowest.path, len(up) * slowest.gib_per_s, in_order))

    def _ended(self, read: _Read, asked: Replies) -> None:
        error = asked.exception()
        if error is not None:
            self.close(str(error))
            return
        part = reduce(ReadEnded.beside, map(_read_ended.decode, asked.result()))
        with self._lock:
            seconds = read.ended.seconds + part.seconds
            read.ended = msgspec.structs.replace(read.ended.beside(part), seconds=seconds)
            read.parts -= 1
            if read.parts:
                return
            self._reads.popleft()
        self._notify(read.ended)

    def _fenced(self, _: object) -> None:
        """Report LinkClosed: the followers have replied to all reads."""
        unfinished = tuple(read.ended.handoff for read in self._reads)
        self._notify(LinkClosed(self._closing or "", unfinished))
        self._closed.set()


def _in_parts(pages: Ints) -> Iterator[Ints]:
    for start in range(0, len(pages), MOST_PAGES):
        yield pages[start : start + MOST_PAGES]


def _parts_of(pages: PagesToRead) -> Iterator[PagesToRead]:
    """Split a read into reads of at most MOST_PAGES pages. The pages of the state stay together.
    Followers read no pieces of weights, for which one empty read keeps the order.
    """
    if any(table == PIECES for table, _ in pages.spans):
        yield PagesToRead(pages.source[:0], pages.destination[:0], ())
        return
    if len(pages.source) <= MOST_PAGES:
        yield pages
        return
    for table, source, destination in pages.by_table():
        if table == STATE:
            yield PagesToRead(source, destination, ())
            continue
        for some in zip(_in_parts(source), _in_parts(destination), strict=True):
            yield PagesToRead(*some, (TablePages(table, len(some[0])),))
