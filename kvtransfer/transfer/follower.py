"""A follower's part of the hand-offs of its node: it serves its pages and reads into them.

Rank 0 decides what is published and read. A thread does its messages in order, and each has one
reply, which a link's thread may send later. The announcement of pages waits for the reply to
PublishPages, so the caller's thread does that itself if the other thread has nothing to do.
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
from kvtransfer.pairing import region_of
from kvtransfer.rank_messages import (
    CloseRankLink,
    DismissConsumer,
    OfferPaths,
    OpenRankLink,
    PollPaths,
    PublishPages,
    RankLinkUp,
    RankMessage,
    RankReadEnded,
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
    PagesToRead,
    RateMeasured,
    ReadEnded,
)
from kvtransfer.transfer.paths import PagesByRank, PathOffers, TransferPaths
from kvtransfer.transfer.rank_paths import paths_of_rank

_LOOK_S = 1.0  # between two looks for late reads
_LINK_END_S = 2.0

log = logging.getLogger(__name__)


class Reply(Protocol):
    """Ends a job. Any thread, once."""

    def __call__(self, result: bytes = b"", error: str = "") -> None: ...


class Awaited(Protocol):
    """The end of the steps before a job."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(slots=True, eq=False)
class _OpenLink:
    number: int  # rank 0's
    opened: Reply | None  # None: it has been called
    link: PageLink = field(init=False)
    reads: deque[Reply] = field(default_factory=deque)
    closed: Reply | None = None


class FollowerTransfer:
    """The messages of rank 0 and the links of one follower.

    Args:
        rank, node: this rank, and the ranks of its node.
        pool: its pages.
        listen_host: in place of rank 0's, if this rank is on another host.
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
        self._consumers: set[int] = set()  # not dismissed
        self._open: dict[int, _OpenLink] = {}  # by rank 0's number
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._turn = threading.Lock()  # of the thread that does a message
        self._num_taken = 0  # messages for the transfer thread
        self._num_done = 0
        self._closed = False
        threading.Thread(target=self._run, name="transfer", daemon=True).start()

    def take(self, body: bytes, steps: Awaited | None, reply: Reply) -> None:
        """Begin a job, without waiting. One thread calls this.

        Args:
            steps: that must end before, because they may still use the pages.
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
        """Do a message on the caller's thread, unless it has to wait."""
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

    # On the transfer thread -----------------------------------------------------------------------

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
        except Exception as error:  # noqa: BLE001  every end of a job is a reply
            reply(error=str(error) if isinstance(error, ServingError) else repr(error))

    def _do(self, message: RankMessage, reply: Reply) -> None:
        match message:
            case StartTransfer():
                self._stop()
                self._start(message)
                reply(encode(TransferStarted(self._rank, region_of(self._pool))))
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
        if config.listen_port:  # each rank has a port of its own
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
        # The next role counts its links from 0 again, and these may end later.
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
        state.reads.append(reply)  # first, because the read may end at once
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

    # On a link's thread ---------------------------------------------------------------------------

    def _event(self, state: _OpenLink, event: LinkEvent) -> None:
        match event:
            case LinkUp(_, path, gib_per_s, members):
                if state.opened is not None:
                    state.opened(encode(RankLinkUp(path, gib_per_s, members)))
                state.opened = None
            case RateMeasured():
                pass  # rank 0's link measures too
            case ReadEnded(_, _, num_bytes, num_parts, seconds, refused):
                ended = RankReadEnded(num_bytes, num_parts, seconds, refused)
                state.reads.popleft()(encode(ended))
            case LinkClosed(_, reason):
                self._work.put(partial(self._closed_link, state, reason))


def _nothing() -> None:
    """Do nothing: no work has come."""
