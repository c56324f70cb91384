"""The embeddings that prefill nodes read from an encode node.

    opened --granted, encoded, pages free--> filling --> published --ClosedEvent--> gone
       `--busy, not encoded--> refused -------------------------------ClosedEvent---^

An image is queued for the encoder when its hand-off is opened, and removed if the consumer cancels.
The encoder caches embeddings by content. Pages hold a copy while it is read.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from common.requests.namespace import WeightsId
from engine.batch.batch import Ints
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.models.vision.encoder_thread import EncoderThread, QueuedImages
from engine.models.vision.seeing import VisionTower
from kvtransfer.messages import Embeddings
from kvtransfer.ports import (
    ClosedEvent,
    FailCommand,
    GrantedEvent,
    OpenedEvent,
    ProducerCommands,
    PublishCommand,
)

MAX_OPEN = 1024  # limit of open hand-offs
MAX_OPEN_BYTES = 1 << 30  # limit of their pixels


@dataclass(slots=True, eq=False)
class _Export:
    """A hand-off. Refused if it has no job."""

    source: Embeddings | None = None
    job: QueuedImages | None = None
    granted: bool = False
    pages: Ints | None = None
    filling: Future[None] | None = None
    published: bool = False
    closed: bool = False  # whether the hand-off is closed


class EmbeddingExports:
    """The exports of this node. Engine thread only.

    Attributes:
        num_cached: images whose embeddings were already cached when they were opened.
    Args:
        pool: memory of `pages`, uint8 [num_pages, page_bytes].
        token_side: pixels per side of an image token.
    """

    def __init__(
        self,
        encoder: EncoderThread,
        tower: VisionTower,
        pages: PageAllocator,
        pool: Tensor,
        port: ProducerCommands,
        *,
        weights: WeightsId,
        token_side: int,
    ) -> None:
        self._encoder = encoder
        self._tower = tower
        self._pages = pages
        self._pool = pool
        self._port = port
        self._weights = weights
        self._token_side = token_side
        self._worker = ThreadPoolExecutor(1, "embedding exports")
        self._exports: dict[int, _Export] = {}  # by serial
        self._counts = dict.fromkeys(("completed", "failed", "refused"), 0)
        self.draining = False
        self.num_cached = 0

    @property
    def busy(self) -> bool:
        return bool(self._exports)

    def counters(self) -> dict[str, int]:
        return {f"embedding_exports/{outcome}": number for outcome, number in self._counts.items()}

    def describe(self) -> dict[str, dict[str, int]]:
        """Return the fields of the node's description."""
        return {
            "pages": self._pages.by_holder(),
            "queues": {"encoding": self._encoder.num_waiting},
            "counters": self.counters(),
        }

    def opened(self, event: OpenedEvent) -> None:
        export = self._exports[event.serial] = _Export()
        refusal = self._refusal(event)
        if refusal or not isinstance(event.source, Embeddings):
            return self._refuse(event.serial, refusal)
        images = [event.source.image]
        cached = not self._encoder.missing(images)  # a new job may be done at once
        job = self._encoder.begin(images)
        if job is None:
            return self._refuse(event.serial, "busy: the queue of the encoder is full")
        export.source, export.job = event.source, job
        self.num_cached += cached

    def granted(self, event: GrantedEvent) -> None:
        self._exports[event.serial].granted = True

    def closed(self, event: ClosedEvent) -> None:
        export = self._exports[event.serial]
        export.closed = True
        if export.job is not None:
            export.job.cancelled = True
            self._counts["completed" if event.completed else "failed"] += 1

    def poll(self) -> None:
        """Fill, publish and release pages. Called in each turn of the engine loop."""
        for serial, export in list(self._exports.items()):
            filled = export.filling is None or export.filling.done()
            if export.closed and filled:
                if export.pages is not None:
                    self._pages.drop(export.pages, PageHolder.PUBLICATION)
                del self._exports[serial]
            elif export.closed or export.published or export.job is None:
                continue
            elif export.filling is None and export.granted and export.job.done:
                self._fill(serial, export)
            elif export.filling is not None and filled:
                self._publish(serial, export)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _refusal(self, event: OpenedEvent) -> str:
        """Return why a hand-off is refused, or "" if it is not."""
        source = event.source
        if not isinstance(source, Embeddings):
            return "an encode node has no KV and no weights for others"
        if self.draining:
            return "this encode node is draining"
        if event.weights != self._weights:
            return "this encode node has other weights"
        if len(self._exports) > MAX_OPEN:
            return f"busy: {MAX_OPEN} images are open already"
        image = source.image
        waiting = (each.source.image.pixels for each in self._exports.values() if each.source)
        if sum(map(len, waiting)) + len(image.pixels) > MAX_OPEN_BYTES:
            return f"busy: open images have {MAX_OPEN_BYTES} bytes of pixels already"
        if not image.num_tokens or not image.fits(self._token_side):
            return "the number of pixels does not match the size of the image"
        num_pieces = -(-image.num_tokens * self._encoder.token_bytes // source.piece_bytes)
        if source.num_pieces != num_pieces or source.piece_bytes > self._pool.shape[1]:
            return f"expected {num_pieces} pieces of {source.piece_bytes} bytes for its embeddings"
        if num_pieces > self._pages.num_pages:
            return f"its embeddings need {num_pieces} pages, the pool has {self._pages.num_pages}"
        return ""

    def _refuse(self, serial: int, reason: str) -> None:
        export = self._exports[serial]
        export.job = None
        self._counts["refused"] += 1
        self._port.post(FailCommand(serial, reason, retryable=False))

    def _fill(self, serial: int, export: _Export) -> None:
        """Copy embeddings into pages if pages are free. Otherwise the next turn tries again, until
        the hand-off expires.
        """
        assert export.source is not None
        pages = self._pages.allocate(export.source.num_pieces, PageHolder.PUBLICATION)
        if pages is None:
            return
        image = export.source.image
        export.pages, rows = pages, self._tower.kept(image)
        # Images whose shape differs from the encoder's may have other embeddings, or none.
        if rows is None or rows.nbytes != image.num_tokens * self._encoder.token_bytes:
            return self._refuse(serial, "the image was not encoded; see the log of the encode node")
        piece_bytes = export.source.piece_bytes
        export.filling = self._worker.submit(self._copy, rows, pages, piece_bytes)
        export.filling.add_done_callback(lambda _: self._encoder.notify())

    def _publish(self, serial: int, export: _Export) -> None:
        assert export.filling is not None and export.pages is not None
        export.filling.result()  # an error ends the node
        export.published, num_pages = True, len(export.pages)
        self._port.post(PublishCommand(serial, 0, num_pages, export.pages, last=True))

    def _copy(self, rows: Tensor, pages: Ints, piece_bytes: int) -> None:
        """Copy embeddings into pages, on the worker thread. Fills pages with zeros after each
        piece, because the consumer may read them.
        """
        with torch.inference_mode():
            data = rows.contiguous().view(-1).view(torch.uint8)
            pieces = data.new_zeros(len(pages), piece_bytes)
            pieces.view(-1)[: len(data)] = data
            whole = data.new_zeros(len(pages), self._pool.shape[1])
            whole[:, :piece_bytes] = pieces
            self._pool[torch.from_numpy(pages).long()] = whole
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()
