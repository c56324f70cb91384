"""Weight sharing between nodes: a node's exports of its weights, and its reads of others'."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import FailedPrecondition, ServingError
from common.requests.namespace import WeightsId
from engine.batch.batch import Ints
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from engine.update import WeightUpdater
from kvtransfer.messages import Weights
from kvtransfer.ports import (
    ClosedEvent,
    FailCommand,
    GrantedEvent,
    OpenedEvent,
    ProducerCommands,
    PublishCommand,
    TransferPort,
)
from node.sharing.exports import SHARE
from node.sharing.reads import SharedReads
from node.sharing.weight_reads import WeightReads

MAX_PIECES_ASKED = 64  # opened and not granted. Further ones are rejected


@dataclass(slots=True, eq=False)
class _WeightExport:
    piece_bytes: int
    filling: Future[int]  # number of pages that have a piece
    reported: bool = False  # whether the result has been reported to its consumer
    closed: bool = False  # the hand-off is closed


class WeightExports:
    """Exports of weights. Engine thread only.

    Args:
        cache: prefix cache over `pages`. Exports use pages that it can evict.
        pool: memory of `pages`, uint8 [num_pages, page_bytes].
        gauges: report of the node, which gets the number of bytes that other nodes have read.
        notify: called by another thread when `poll` is due.
    Attributes:
        pages_in_use: pages held for publication, by serial.
    """

    def __init__(
        self,
        weights: WeightUpdater,
        cache: PrefixCache,
        pages: PageAllocator,
        pool: Tensor,
        port: ProducerCommands,
        gauges: dict[str, float],
        notify: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._cache = cache
        self._pages = pages
        self._pool = pool
        self._port = port
        self._notify = notify
        self._worker = ThreadPoolExecutor(1, "weight exports")
        self._asked: dict[int, tuple[WeightsId, Weights]] = {}  # by serial, until they are granted
        self._exports: dict[int, _WeightExport] = {}
        self.pages_in_use: dict[int, Ints] = {}
        self._gauges = gauges
        self._gauges["total_weight_bytes/sent"] = 0.0

    def opened(self, event: OpenedEvent, source: Weights) -> None:
        if len(self._asked) >= MAX_PIECES_ASKED:
            self._refuse(event.serial, "busy: too many nodes are fetching weights", retryable=True)
        else:
            self._asked[event.serial] = event.weights, source

    def granted(self, event: GrantedEvent) -> None:
        asked = self._asked.pop(event.serial, None)
        if asked is None:
            return  # rejected
        serial, (weights, source) = event.serial, asked
        if weights != self._weights.id or not self._weights.whole:
            return self._refuse(serial, "the node has other weights, or none", retryable=False)
        piece_bytes, page_bytes = source.piece_bytes, self._pool.shape[1]
        if not 0 < piece_bytes <= page_bytes:
            reason = f"a piece of {piece_bytes} bytes does not fit into a page of {page_bytes}"
            return self._refuse(serial, reason, retryable=False)
        exported = sum(map(len, self.pages_in_use.values()))
        num_pages = min(source.num_pieces, self._pages.num_pages // SHARE - exported)
        pages = self._cache.allocate(num_pages, PageHolder.PUBLICATION) if num_pages > 0 else None
        if pages is None:
            return self._refuse(serial, "busy: no pages for weights now", retryable=True)
        start = source.first_piece * piece_bytes
        filling = self._worker.submit(self._fill, start, piece_bytes, pages)
        self._exports[serial] = _WeightExport(piece_bytes, filling)
        self.pages_in_use[serial] = pages
        filling.add_done_callback(lambda _: self._notify())

    def closed(self, event: ClosedEvent) -> None:
        self._asked.pop(event.serial, None)
        export = self._exports.get(event.serial)
        if export is not None:
            export.closed = True
            num_bytes = export.filling.result() * export.piece_bytes if event.completed else 0
            self._gauges["total_weight_bytes/sent"] += num_bytes

    def poll(self) -> None:
        """Publish filled pages, and release pages that have been read. Called in each turn while
        pages are in use.
        """
        for serial, export in [each for each in self._exports.items() if each[1].filling.done()]:
            if export.closed:
                self._pages.drop(self.pages_in_use.pop(serial), PageHolder.PUBLICATION)
                del self._exports[serial]
            elif not export.reported:
                export.reported = True
                self._publish(serial, export)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _publish(self, serial: int, export: _WeightExport) -> None:
        error = export.filling.exception()
        if isinstance(error, ServingError):
            self._port.post(FailCommand(serial, str(error), retryable=False))
            return
        num_pages = export.filling.result()
        pages = self.pages_in_use[serial][:num_pages]
        self._port.post(PublishCommand(serial, 0, num_pages, pages, last=True))

    def _refuse(self, serial: int, reason: str, *, retryable: bool) -> None:
        self._port.post(FailCommand(serial, reason, retryable))

    def _fill(self, start: int, piece_bytes: int, pages: Ints) -> int:
        """Copy pieces from byte `start` on into these pages, on the worker. Returns their
        number.
        """
        # Whole pages with zeros after a piece, because the consumer may read them.
        buffer = torch.zeros(len(pages), self._pool.shape[1], dtype=torch.uint8)
        file, num_pages = self._weights.exported(), 0
        try:
            for page in buffer.numpy():
                if not file.read(start + num_pages * piece_bytes, page[:piece_bytes].data):
                    break
                num_pages += 1
        except OSError as error:
            raise FailedPrecondition(f"its weights cannot be read again: {error}") from error
        self._pool[torch.from_numpy(pages[:num_pages]).long()] = buffer[:num_pages].to(
            self._pool.device
        )
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)
        return num_pages


class WeightSharing:
    """The weight sharing of a node: its exports and its reads. Engine thread only.

    Attributes:
        gauges: totals, named as in EngineStats.
    Args:
        pool: memory of `pages`.
        notify: called by another thread when `poll` is due.
    """

    def __init__(
        self,
        weights: WeightUpdater,
        shared: SharedReads,
        *,
        cache: PrefixCache,
        pages: PageAllocator,
        pool: Tensor,
        port: TransferPort,
        notify: Callable[[], None],
    ) -> None:
        self.gauges: dict[str, float] = {}
        self.exports = WeightExports(weights, cache, pages, pool, port, self.gauges, notify)
        self.reads = WeightReads(
            weights,
            shared,
            gauges=self.gauges,
            pages=pages,
            pool=pool,
            port=port,
            notify=notify,
        )

    @property
    def busy(self) -> bool:
        return bool(self.exports.pages_in_use or self.reads.busy)

    def close(self) -> None:
        """Stop both ends. Nothing new is started."""
        self.exports.close()
        self.reads.close()
