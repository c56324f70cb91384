"""Reads of another node's weights, while this node is paused.

    wanted --paired with the producer--> piece after piece --all are here--> checked

A few windows of pieces are in progress at once. Each is a hand-off into pages of this node's pool,
which are then copied into separate memory. Lost windows are requested again. Nothing changes until
all pieces have arrived and are correct.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError, FailedPrecondition, Overloaded, ServingError
from common.requests.namespace import WeightsId
from engine.batch.batch import Ints
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.models.one_file import ReceivedFile
from engine.sizing import free_bytes
from engine.update import WeightUpdater
from kvtransfer.messages import CancelHandoff, HandoffId, Weights
from kvtransfer.ports import (
    CompletedEvent,
    ConsumerCommands,
    FailedEvent,
    ProducerUp,
    ReadsEndedEvent,
)
from node.sharing.exports import SHARE
from node.sharing.reads import SharedReads


@dataclass(frozen=True, slots=True)
class WeightWindow:
    """The pieces [first, past)."""

    first: int
    past: int


class WeightPieces:
    """The pieces of one file, numbered from 0. Chooses the next ones to request. The length is
    unknown until the beginning of the file arrives.

    Attributes:
        piece_bytes: size of each piece except the last. Set before the first window is requested.
        num_bytes: length of the file, once it is known.
    Args:
        most: pieces of one window.
    """

    def __init__(self, most: int) -> None:
        self.piece_bytes = 0
        self._most = most
        self._num_asked = 0  # requested pieces, from the first on
        self._again: deque[WeightWindow] = deque()
        self._again_at = 0.0
        self._past: int | None = None  # number of pieces, once known
        self.num_bytes: int | None = None

    @property
    def all_asked(self) -> bool:
        """Return whether every piece has been requested, and none was lost since."""
        return self._past is not None and self._num_asked >= self._past and not self._again

    def next(self, now: float) -> WeightWindow | None:
        """Return the next window or None. The caller requests it, or calls `not_asked` or
        `lost`.
        """
        if self._again:
            return self._again.popleft() if now >= self._again_at else None
        first, past = self._num_asked, self._num_asked + self._most
        if self._past is not None:
            past = min(past, self._past)
        if past <= first:
            return None
        self._num_asked = past
        return WeightWindow(first, past)

    def not_asked(self, window: WeightWindow) -> None:
        """Put a window back, as the next one."""
        self._again.appendleft(window)

    def lost(self, window: WeightWindow, again_at: float = 0.0) -> None:
        """Put a lost window back. No lost window is requested again before `again_at`."""
        self._again.append(window)
        self._again_at = max(self._again_at, again_at)

    def ends_at(self, num_bytes: int) -> None:
        """Set the length of the file. Lost pieces beyond it are not requested again."""
        self.num_bytes, self._past = num_bytes, -(-num_bytes // self.piece_bytes)
        clipped = [WeightWindow(each.first, min(each.past, self._past)) for each in self._again]
        self._again = deque(each for each in clipped if each.first < each.past)


_HOST = torch.device("cpu")


class WeightCopies:
    """Copies arrived pieces of another node's weights out of their pages, in order, on one thread.

    Args:
        pool: memory of the pages, uint8 [num_pages, page_bytes].
        notify: called by that thread when a copy is done.
    """

    def __init__(self, pool: Tensor, notify: Callable[[], None]) -> None:
        self._pool = pool
        self._notify = notify
        self._worker = ThreadPoolExecutor(1, "weight reads")

    def copy(
        self, file: ReceivedFile, first: int, pages: Ints, pieces: WeightPieces, producer: str
    ) -> Future[int | None]:
        """Copy the pieces from `first` on out of these pages, which must not change until the copy
        is done. The Future has the length of the whole file in bytes once it is known, else None.
        It fails with FailedPrecondition if memory is short, or the file has no weights.
        """
        sizes = pieces.piece_bytes, pieces.num_bytes
        copying = self._worker.submit(self._copy, file, first, pages, sizes, producer)
        copying.add_done_callback(lambda _: self._notify())
        return copying

    def drop(self, file: ReceivedFile) -> None:
        """Close the file after the copies to it that are in progress."""
        self._worker.submit(file.close)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _copy(
        self,
        file: ReceivedFile,
        first: int,
        pages: Ints,
        sizes: tuple[int, int | None],
        producer: str,
    ) -> int | None:
        piece_bytes, num_bytes = sizes
        start = first * piece_bytes
        rows = self._pool[torch.from_numpy(pages).long(), :piece_bytes].to(_HOST)
        data = rows.numpy().data.cast("B")
        try:
            file.write(start, data if num_bytes is None else data[: num_bytes - start])
            if num_bytes is not None:
                return num_bytes
            expected = file.expected_bytes()
            if expected is not None:
                _check_room(expected)
                file.set_bytes(expected)
            return expected
        except ConfigError as error:
            reason = str(error).replace(f"{file.directory}/", "")
            raise FailedPrecondition(f"{producer}: {reason}") from error
        except OSError as error:
            raise FailedPrecondition(
                f"weights: there is not enough memory for them: {error}"
            ) from error


def _check_room(wanted: int) -> None:
    left = free_bytes(_HOST, 1.0)
    if wanted > left:
        raise FailedPrecondition(
            f"weights: {wanted / 2**30:.2f} GiB are needed in addition to the present ones, "
            f"{left / 2**30:.2f} GiB are free"
        )


WINDOWS = 2  # windows in progress at once
WINDOW_PAGES, WINDOW_BYTES = 64, 32 << 20  # limits of one window
WINDOW_S = 30.0  # timeout of one window
AGAIN_S = 0.1  # until lost windows are requested again
STILL_S = 60.0  # timeout without progress
TAKE_S = 540.0  # timeout of the whole read


@dataclass(slots=True, eq=False)
class _Read:
    """A window in progress."""

    window: WeightWindow
    copying: Future[int | None] | None = None
    lands: bool = True
    over: bool = False  # no more data will arrive


@dataclass(slots=True, eq=False)
class _Taking:
    weights: WeightsId
    address: str
    file: ReceivedFile
    pieces: WeightPieces
    began: float
    moved_at: float
    error: ServingError | None = None  # why the pieces cannot be read
    fetched: bool = False  # all pieces are in `file`, which belongs to WeightUpdater now


class WeightReads:
    """The reads of another node's weights. Engine thread only.

    `read` requests windows. `poll` finishes them, also after `read` has failed.

    Attributes:
        pages_in_use: pages of windows, held until no bytes land in them and no copy reads them.
    Args:
        pool: memory of `pages`, uint8 [num_pages, page_bytes].
        gauges: report of the node, which gets the totals of all reads.
        notify: called by another thread when `poll` is due.
    """

    def __init__(
        self,
        weights: WeightUpdater,
        shared: SharedReads,
        *,
        gauges: dict[str, float],
        pages: PageAllocator,
        pool: Tensor,
        port: ConsumerCommands,
        notify: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._shared = shared
        self._pages = pages
        most = min(WINDOW_PAGES, WINDOW_BYTES // pool.shape[1], pages.num_pages // SHARE)
        self._window_pages = max(most, 1)
        self._port = port
        self._copies = WeightCopies(pool, notify)
        self._taking: _Taking | None = None
        self._reads: dict[HandoffId, _Read] = {}
        self.pages_in_use: dict[HandoffId, Ints] = {}
        self._gauges = gauges
        names = ("bytes/read", "read_seconds", "reads/completed", "reads/failed")
        self._gauges |= {f"total_weight_{name}": 0.0 for name in names}

    @property
    def busy(self) -> bool:
        return bool(self._taking or self._reads)

    def read(self, weights: WeightsId, address: str) -> Iterator[None]:
        """Read the weights of the node at `address`, one step in each turn of the engine loop.
        `WeightUpdater.put` may follow.

        Raises:
            ServingError: they cannot be read. Nothing has changed.
        """
        if self.busy:
            raise Overloaded("weights are being read already")
        now, pieces = time.monotonic(), WeightPieces(self._window_pages)
        taking = _Taking(weights, address, self._weights.receive(), pieces, now, now)
        self._taking, outcome = taking, "failed"
        try:
            yield from self._fetch(taking)
            taking.fetched = True
            preparing = self._weights.prepare_received(taking.file, address)
            while not preparing.done():
                yield None
            if preparing.result() != weights:
                reason = f"{address}: the content differs from the expected hash"
                raise FailedPrecondition(reason)
            outcome = "completed"
        finally:
            self._taking = None
            self._gauges[f"total_weight_reads/{outcome}"] += 1
            self._gauges["total_weight_read_seconds"] += time.monotonic() - taking.began

    def held(self, event: CompletedEvent) -> None:
        read, taking = self._reads[event.id], self._taking
        if taking is None:
            read.over = True
            return
        if not event.num_tokens:
            read.over = True
            taking.error = FailedPrecondition(f"{taking.address}: it sent incomplete weights")
            return
        first, past = read.window.first, read.window.first + event.num_tokens
        if past < read.window.past:
            taking.pieces.lost(WeightWindow(past, read.window.past))
        taking.moved_at = time.monotonic()
        num_bytes = event.num_tokens * taking.pieces.piece_bytes
        self._gauges["total_weight_bytes/read"] += num_bytes
        pages = self.pages_in_use[event.id][: event.num_tokens]
        read.copying = self._copies.copy(taking.file, first, pages, taking.pieces, taking.address)

    def lost(self, event: FailedEvent) -> None:
        read, taking = self._reads[event.id], self._taking
        read.over = True
        if taking is None:
            return
        if event.retryable:
            taking.pieces.lost(read.window, time.monotonic() + AGAIN_S)
        else:
            taking.error = FailedPrecondition(f"{taking.address}: {event.reason}")

    def reads_ended(self, event: ReadsEndedEvent) -> None:
        self._reads[event.id].lands = False

    def poll(self) -> None:
        """Finish windows that are copied or lost. Called in each turn while pages are in use."""
        for handoff_id, read in list(self._reads.items()):
            if read.copying is not None and read.copying.done() and not read.over:
                read.over = True
                if self._taking is not None:
                    self._copied(self._taking, read.copying)
            if read.over and not read.lands:
                self._pages.drop(self.pages_in_use.pop(handoff_id), PageHolder.READ)
                del self._reads[handoff_id]

    def close(self) -> None:
        self._copies.close()
        if self._taking is not None and not self._taking.fetched:
            self._taking.file.close()

    def _copied(self, taking: _Taking, copying: "Future[int | None]") -> None:
        error = copying.exception()
        if error is None:
            num_bytes = copying.result()
            if num_bytes is not None:
                taking.pieces.ends_at(num_bytes)
        elif isinstance(error, ServingError):
            taking.error = error
        else:
            raise error

    def _fetch(self, taking: _Taking) -> Iterator[None]:
        """Request windows until all pieces have arrived."""
        try:
            while not self._has_arrived(taking):
                if taking.address in self._shared.producers:
                    self._ask(taking, self._shared.producers[taking.address])
                yield None
        except ServingError as error:
            self._abandon(taking, error)
            raise

    def _has_arrived(self, taking: _Taking) -> bool:
        """Return whether all pieces have arrived. Raise ServingError if they cannot be read."""
        if taking.error is not None:
            raise taking.error
        now = time.monotonic()
        if now - taking.moved_at > STILL_S or now - taking.began > TAKE_S:
            paired = taking.address in self._shared.producers
            reason = "it sends no weights" if paired else "it does not pair with this node"
            raise FailedPrecondition(f"{taking.address}: {reason}: see the logs of both nodes")
        return taking.pieces.all_asked and all(read.over for read in self._reads.values())

    def _ask(self, taking: _Taking, producer: ProducerUp) -> None:
        """Request windows up to the limit. The windows after the header wait for it to arrive."""
        pieces = taking.pieces
        # If another producer at this address has smaller pages, it refuses pieces that do not fit.
        pieces.piece_bytes = pieces.piece_bytes or producer.piece_bytes
        most = WINDOWS if pieces.num_bytes is not None else 1
        while len(self._reads) < most and (window := pieces.next(time.monotonic())) is not None:
            num_pages = window.past - window.first
            source = Weights(window.first, num_pages, pieces.piece_bytes)
            opened = self._shared.open(producer, source, taking.weights, WINDOW_S, num_pages)
            if opened is None:
                pieces.not_asked(window)
                return
            handoff_id, pages = opened
            self._reads[handoff_id], self.pages_in_use[handoff_id] = _Read(window), pages

    def _abandon(self, taking: _Taking, error: ServingError) -> None:
        """Cancel the windows that have not arrived, and close the file."""
        for handoff_id, read in self._reads.items():
            if not read.over and read.copying is None:
                read.over = True
                self._port.post(CancelHandoff(handoff_id, str(error)))
        self._copies.drop(taking.file)
