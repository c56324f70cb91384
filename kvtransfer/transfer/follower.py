"""A follower's part in the hand-offs of its node: serves its own pages and reads into them.

Rank 0 decides what is published and read. One thread handles its messages in order. Each message
gets one reply, which a link's thread may send later. Rank 0 announces pages only after the replies
to PublishPages. To save time, the thread that receives PublishPages handles it itself if no other
message is pending.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec
import numpy as np

from common.config import TransferConfig
from common.copy_map import NodeShape
from common.errors import ServingError, TransferError
from kvtransfer import data_paths
from kvtransfer.backends.base import PagePool
from kvtransfer.ports import PagesToRead
from kvtransfer.rank_messages import (
    CloseRankLink,
    DismissConsumer,
    OfferPaths,
    OpenRankLink,
    PollPaths,
    PublishPages,
    RankMessage,
    ReadRankPages,
    StartTransfer,
    StopTransfer,
    TransferStarted,
    WithdrawRankPages,
    decode,
    encode,
)
from kvtransfer.transfer.link import (
    LinkClosed,
    LinkEvent,
    LinkUp,
    PageLink,
    RateMeasured,
    ReadEnded,
)
from kvtransfer.transfer.paths import PagesByRank, PathOffers, TransferPaths
from kvtransfer.transfer.rank_paths import paths_of_rank

_LOOK_S = 1.0  # interval of checks for late reads
_LINK_END_S = 2.0

log = logging.getLogger(__name__)


class Reply(Protocol):
    """Replies to a job. Any thread may call it, once."""

    def __call__(self, result: bytes = b"", error: str = "") -> None: ...


class Awaited(Protocol):
    """The steps that must end before a job starts."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(slots=True, eq=False)
class _OpenLink:
    number: int  # number that rank 0 gave the link
    opened: Reply | None  # None: already called
    link: PageLink = field(init=False)
    reads: deque[Reply] = field(default_factory=deque)
    closed: Reply | None = None


class FollowerTransfer:
    """Handles rank 0's messages, and has the links of one follower.

    Args:
        rank, node: this rank, and the ranks of its node.
        listen_host: replaces rank 0's setting if this rank is on another host.
    """

    def __init__(
        self,
        rank: int,
        node: NodeShape,
        pool: PagePool,
        pages_by_rank: PagesByRank,
        listen_host: str | None = None,
    ) -> None:
        self._rank = rank
        self._node = node
        self._pool = pool
        self._pages_by_rank = pages_by_rank
        self._listen_host = listen_host
        self._paths: TransferPaths | None = None  # None: not started
        self._consumers: set[int] = set()  # admitted consumers
        self._open: dict[int, _OpenLink] = {}  # by rank 0's number of the link
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._turn = threading.Lock()  # held while a message is handled
        self._num_taken = 0  # messages for this object's thread
        self._num_done = 0
        self._closed = False
        threading.Thread(target=self._run, name="transfer", daemon=True).start()

    def take(self, body: bytes, steps: Awaited | None, reply: Reply) -> None:
        """Start a job without waiting. Always called by the same thread.

        Args:
            steps: steps that must end first, because they may still use the pages.
        """
        try:
            message = decode.decode(body)
        except msgspec.DecodeError as error:
            reply(error=repr(error))
            return
        if not isinstance(message, PublishPages) or not self._done_here(message, steps, reply):
            self._num_taken += 1
            self._work.put(partial(self._begin, message, steps, reply))

    def _done_here(self, message: PublishPages, steps: Awaited | None, reply: Reply) -> bool:
        """Handle a message on the calling thread, unless it would have to wait."""
        is_first = self._num_done == self._num_taken and (steps is None or steps.is_done)
        if not is_first or not self._turn.acquire(blocking=False):
            return False
        try:
            self._try(lambda: self._do(message, reply), reply)
        finally:
            self._turn.release()
        return True

    def close(self) -> None:
        """End the thread, and all links and paths."""
        self._work.put(self._end)

    # On the transfer thread

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._closed:
            work: Callable[[], None] = _nothing
            with contextlib.suppress(Empty):
                work = self._work.get(timeout=_LOOK_S)
            with self._turn:
                work()
                now = time.monotonic()
                if now >= looked + _LOOK_S:
                    looked = now
                    for state in self._open.values():
                        state.link.expire(now)

    def _end(self) -> None:
        self._closed = True
        self._stop()

    def _begin(self, message: RankMessage, steps: Awaited | None, reply: Reply) -> None:
        def begin() -> None:
            if steps is not None:
                steps.wait()
            self._do(message, reply)

        self._try(begin, reply)
        self._num_done += 1

    def _try(self, work: Callable[[], None], reply: Reply) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  every job gets a reply
            reply(error=str(error) if isinstance(error, ServingError) else repr(error))

    def _do(self, message: RankMessage, reply: Reply) -> None:
        match message:
            case StartTransfer():
                self._stop()
                self._start(message)
                reply(encode(TransferStarted(self._rank, self._pool.region)))
            case StopTransfer():
                self._stop()
                reply()
            case OfferPaths(consumer=consumer):
                self._offer(consumer, reply)
            case DismissConsumer(consumer=consumer):
                self._consumers.discard(consumer)
                if self._paths is not None:
                    self._paths.offers.dismiss(consumer)
                reply()
            case PublishPages(consumer=consumer, pages=pages):
                self._offers.publish(consumer, np.frombuffer(pages, np.int32))
                reply()
            case WithdrawRankPages(consumer=consumer, pages=pages):
                self._offers.withdraw(consumer, np.frombuffer(pages, np.int32))
                reply()
            case PollPaths():
                self._offers.poll()
                reply()
            case OpenRankLink():
                self._open_link(message, reply)
            case ReadRankPages():
                self._read(message, reply)
            case CloseRankLink(link=link, reason=reason):
                self._close(link, reason, reply)

    def _start(self, message: StartTransfer) -> None:
        config = TransferConfig.model_validate_json(message.config)
        if self._listen_host is not None:
            config = config.model_copy(update={"listen_host": self._listen_host})
        if config.listen_port:  # each rank has its own port
            config = config.model_copy(update={"listen_port": config.listen_port + self._rank})
        self._paths = paths_of_rank(
            self._rank,
            self._node,
            self._pool,
            config,
            data_paths.backends(config, tls=message.tls),
            self._pages_by_rank,
            message.instance,
        )

    def _stop(self) -> None:
        if self._paths is not None:
            self._paths.offers.close()
        self._paths = None
        self._consumers.clear()
        # The next role numbers its links from 0 again, while these may still be closing.
        ending, self._open = self._open, {}
        for state in ending.values():
            state.link.close("the role of this node changes")
        for state in ending.values():
            if not state.link.join(_LINK_END_S):
                log.warning("link thread did not stop")

    @property
    def _offers(self) -> PathOffers:
        return self._started.offers

    @property
    def _started(self) -> TransferPaths:
        if self._paths is None:
            raise TransferError("this role has ended")
        return self._paths

    def _offer(self, consumer: int, reply: Reply) -> None:
        self._consumers.add(consumer)
        preparations = self._offers.prepare(consumer)
        left = len(preparations)

        def admit() -> None:
            if consumer not in self._consumers:
                raise TransferError("the consumer is no longer connected")
            reply(encode(self._offers.admit(consumer)))

        def prepared() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._try(admit, reply)

        for preparation in preparations:
            preparation.add_done_callback(lambda _: self._work.put(prepared))
        if not preparations:
            admit()

    # Links

    def _open_link(self, message: OpenRankLink, reply: Reply) -> None:
        state = _OpenLink(message.link, reply)
        notify = partial(self._event, state)
        state.link = self._started.opener.open(message.hello, message.backend, notify)
        self._open[message.link] = state

    def _read(self, message: ReadRankPages, reply: Reply) -> None:
        source = np.frombuffer(message.source_pages, np.int32)
        destination = np.frombuffer(message.destination_pages, np.int32)
        pages = PagesToRead(source, destination, message.spans)
        state = self._open.get(message.link)
        if state is None:
            raise TransferError("the link is closed")
        state.reads.append(reply)  # before `post`, because the read may end at once
        try:
            state.link.post(message.handoff, pages)
        except ServingError:
            state.reads.pop()
            raise

    def _close(self, number: int, reason: str, reply: Reply) -> None:
        state = self._open.get(number)
        if state is None:
            reply()
            return
        state.closed = reply
        state.link.close(reason)

    def _closed_link(self, state: _OpenLink, reason: str) -> None:
        if self._open.get(state.number) is state:
            del self._open[state.number]
        waiting = [] if state.opened is None else [state.opened]
        for reply in (*waiting, *state.reads):
            reply(error=reason)
        if state.closed is not None:
            state.closed()

    # On a link's thread

    def _event(self, state: _OpenLink, event: LinkEvent) -> None:
        match event:
            case LinkUp():
                if state.opened is not None:
                    state.opened(encode(event))
                state.opened = None
            case RateMeasured():
                pass  # rank 0's link measures the rate
            case ReadEnded():
                state.reads.popleft()(encode(event))
            case LinkClosed(reason):
                self._work.put(partial(self._closed_link, state, reason))


def _nothing() -> None:
    """Stand in for a message when none has come, so that `_run` looks for late reads."""
