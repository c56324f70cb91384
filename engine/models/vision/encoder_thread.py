"""The thread that encodes images concurrently with forwards, so that other requests continue.

A waiting request is admitted after its images are encoded. The forward finds their embeddings in
the cache of the VisionTower. It encodes images itself if they have been evicted by then.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from common.limits import MAX_IMAGES, MAX_PIXEL_BYTES
from common.logs import kv
from common.requests.images import Image
from engine.batch.batch import Ints
from engine.models.vision.seeing import VisionTower

log = logging.getLogger(__name__)

MAX_QUEUED = 4 * MAX_IMAGES  # limit of queued images
# Pixels of images that are encoded in one call. Memory for one image of this size is reserved.
_BATCH_BYTES = MAX_PIXEL_BYTES


@dataclass(slots=True, eq=False)
class QueuedImages:
    """Images of one request, which are encoded in one or more calls.

    Attributes:
        left: number of images that are not encoded yet.
        cancelled: whether images whose encoding has not begun can be skipped.
    """

    left: int
    cancelled: bool = False

    @property
    def done(self) -> bool:
        return self.left == 0


class EncoderThread:
    """Encodes images on a thread that starts with the first image, see InputEncoder. Engine thread
    only.

    Args:
        pool: pages from which `copy` reads, uint8 [num_pages, page_bytes].
        token_size, dtype: size and dtype of an image token's embedding.
    """

    def __init__(
        self, tower: VisionTower, pool: Tensor, token_size: int, dtype: torch.dtype
    ) -> None:
        self.notify: Callable[[], None] = lambda: None
        self.batches = 0
        self.token_bytes = token_size * dtype.itemsize
        self._tower = tower
        self._pool = pool
        self._device = pool.device
        self._dtype = dtype
        self._queue: deque[tuple[Image, QueuedImages]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._copies: ThreadPoolExecutor | None = None  # from the first copy on

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def begin(self, images: Sequence[Image]) -> QueuedImages | None:
        if self._queue and len(self._queue) + len(images) > MAX_QUEUED:
            return None
        missing = self._tower.missing(images)
        job = QueuedImages(len(missing))
        if not missing:
            return job
        with self._changed:
            self._queue.extend((image, job) for image in missing)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="images", daemon=True)
            self._thread.start()
        return job

    def missing(self, images: Sequence[Image]) -> list[Image]:
        return self._tower.missing(images)

    @property
    def epoch(self) -> int:
        return self._tower.epoch

    def copy(self, image: Image, pages: Ints, piece_bytes: int, epoch: int) -> Future[None]:
        """See InputEncoder. Runs on another thread."""
        if self._copies is None:
            self._copies = ThreadPoolExecutor(1, "image copies")
        copying = self._copies.submit(self._copy, image, pages, piece_bytes, epoch)
        copying.add_done_callback(lambda _: self.notify())
        return copying

    def close(self) -> None:
        """End the threads after the current batch and the current copy."""
        if self._copies is not None:
            self._copies.shutdown(cancel_futures=True)
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _copy(self, image: Image, pages: Ints, piece_bytes: int, epoch: int) -> None:
        with torch.inference_mode():
            rows = self._pool[torch.from_numpy(pages).long(), :piece_bytes].view(-1)
            data = rows[: image.num_tokens * self.token_bytes]
            made = data.view(self._dtype).view(image.num_tokens, -1)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._tower.put(image, made, epoch)

    def _run(self) -> None:
        cuda = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        while batch := self._next_batch():
            images = [image for image, job in batch if not job.cancelled]
            try:
                self._tower.encode(images, stream)
            except Exception as error:  # noqa: BLE001  the forward meets it again and reports it
                log.warning("images not encoded %s", kv(images=len(images), reason=repr(error)))
            self.batches += bool(images)
            for _, job in batch:
                job.left -= 1
            self.notify()

    def _next_batch(self) -> list[tuple[Image, QueuedImages]]:
        """Wait for images. Return the images for one call of the encoder. Empty at the end."""
        batch: list[tuple[Image, QueuedImages]] = []
        num_bytes = 0
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            while self._queue:
                num_bytes += len(self._queue[0][0].pixels)
                if batch and num_bytes > _BATCH_BYTES:
                    break
                batch.append(self._queue.popleft())
        return batch
