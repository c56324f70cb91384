"""Reads of image embeddings from encode nodes, for the prompts of a prefill node.

    started --paired, pages free--> opened --Completed--> copied --> cached
       `--too late, refused, lost--> given up: this node encodes the image itself

Reads start when a prompt's hand-off is opened, so that images are encoded while the prompt waits
for its Grant. The prompt is prepared when all its reads have ended, successfully or not. A failed
read never fails a request.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from common.requests.images import Image
from common.requests.namespace import WeightsId
from engine.batch.batch import Ints
from engine.core import InputEncoder
from engine.kv_cache.pages import PageAllocator, PageHolder
from kvtransfer.messages import CancelHandoff, Embeddings, HandoffId
from kvtransfer.ports import (
    CompletedEvent,
    ConsumerCommands,
    FailedEvent,
    NodeEvent,
    ProducerDown,
    ProducerUp,
    ReadsEndedEvent,
)
from node.sharing.exports import SHARE
from node.sharing.reads import SharedReads
from node.timings import ImageReads

MAX_READS = 256  # images read at the same time
PAIR_S = 3.0  # longest wait for a paired encode node and free pages
GRACE_S = 1.0  # time by which the encode node's deadline is later than this node's
OUTCOMES = ("completed", "failed", "late", "unpaired", "no_capacity")


@dataclass(slots=True, eq=False)
class _Read:
    """The read of one image. It has an id once its hand-off is opened."""

    image: Image
    address: str
    due: float
    waiting: set[int] = field(default_factory=set)  # keys of the waiting requests
    id: HandoffId | None = None
    num_pieces: int = 0
    piece_bytes: int = 0
    epoch: int = 0  # epoch of the encoder when the read was opened
    copying: Future[None] | None = None


@dataclass(slots=True, eq=False)
class _Landing:
    """The destination pages of a read. They are held until no bytes can land in them and their
    content is copied.
    """

    pages: Ints
    lands: bool = True
    copying: Future[None] | None = None


class _Wait(NamedTuple):
    """A request that waits for reads."""

    names: set[bytes]  # names of its images that are being read
    timings: ImageReads


class EmbeddingReads:
    """Reads embeddings of images for the requests of this node. Requests are named by their keys.
    Engine thread only.

    Args:
        encoder: image encoder of the model. None: the model has none, and nothing is read.
        timeout_s: time limit of an opened read.
    Attributes:
        in_progress: reads by name of the image.
        landing: destination pages of opened reads.
        waits: requests that wait for reads, by key.
    """

    def __init__(
        self,
        encoder: InputEncoder | None,
        shared: SharedReads,
        port: ConsumerCommands,
        *,
        pages: PageAllocator,
        weights: Callable[[], WeightsId],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoder = encoder
        self._shared = shared
        self._pages = pages
        self._port = port
        self._weights = weights
        self._timeout_s = timeout_s
        self._clock = clock
        self._absent: set[str] = set()  # encode nodes that were lost, or did not pair in time
        self.in_progress: dict[bytes, _Read] = {}
        self._by_id: dict[HandoffId, _Read] = {}
        self.landing: dict[HandoffId, _Landing] = {}
        self.waits: dict[int, _Wait] = {}
        self._over: dict[int, None] = {}  # keys to be returned by take_over
        self.counts = {f"embedding_reads/{outcome}": 0 for outcome in OUTCOMES}

    def start(
        self, key: int, images: Sequence[Image], addresses: Sequence[str], timings: ImageReads
    ) -> None:
        """Start to read the embeddings of a request's images that are not cached here.

        Args:
            addresses: the encode node of each image.
            timings: timings of the request, to which ended reads are added.
        """
        if self._encoder is None:
            return
        of_image = dict(zip((image.name for image in images), addresses, strict=False))
        for image in self._encoder.missing(images):
            read = self.in_progress.get(image.name)
            if read is None:
                read = self._begin(image, of_image.get(image.name, ""))
            if read is not None:
                read.waiting.add(key)
                self.waits.setdefault(key, _Wait(set(), timings)).names.add(image.name)
        if (wait := self.waits.get(key)) is not None:
            timings.begun, timings.wanted = self._clock(), len(wait.names)

    def take_over(self) -> list[int]:
        """Return the keys whose reads have all ended since the last call, successfully or not."""
        over, self._over = self._over, {}
        return list(over)

    def forget(self, key: int) -> None:
        """Forget an ended request in any state. Reads that no other request waits for end."""
        self._over.pop(key, None)
        wait = self.waits.pop(key, None)
        for name in () if wait is None else wait.names:
            read = self.in_progress[name]
            read.waiting.discard(key)
            if not read.waiting and read.copying is None:
                self._cancel(read, "the request has ended")
                del self.in_progress[name]

    def handle(self, event: NodeEvent) -> bool:
        """Handle an event of the transfer thread. Returns False if others must handle it too."""
        match event:
            case ProducerUp(address=address):
                self._absent.discard(address)
            case ProducerDown(address=address):
                self._is_absent(address)
            case CompletedEvent(id=id) if id in self.landing:
                self._landed(event)
                return True
            case FailedEvent(id=id) if id in self.landing:
                self._end(id, "failed")
                return True
            case ReadsEndedEvent(id=id) if id in self.landing:
                self.landing[id].lands = False
                return True
        return False

    def poll(self) -> None:
        """Open, finish and give up reads. Called in each turn of the engine loop with reads."""
        now = self._clock()
        for read in list(self.in_progress.values()):
            if read.copying is not None:
                if read.copying.done():
                    self._finish(read, "failed" if read.copying.exception() else "completed")
            elif now >= read.due:
                self._give_up(read)
            elif read.id is None and read.address in self._shared.producers:
                self._open(read, self._shared.producers[read.address], now)
        for id, landing in list(self.landing.items()):
            copied = landing.copying is None or landing.copying.done()
            if copied and not landing.lands and id not in self._by_id:
                self._pages.drop(landing.pages, PageHolder.READ)
                del self.landing[id]

    def _begin(self, image: Image, address: str) -> _Read | None:
        """Return a new read, or None if this node must encode the image itself."""
        if not address or address in self._absent:
            self.counts["embedding_reads/unpaired"] += 1
            return None
        if len(self.in_progress) >= MAX_READS:
            self.counts["embedding_reads/no_capacity"] += 1
            return None
        read = _Read(image, address, self._clock() + min(PAIR_S, self._timeout_s))
        self.in_progress[image.name] = read
        return read

    def _open(self, read: _Read, producer: ProducerUp, now: float) -> None:
        """Open the hand-off of a read if pages are free."""
        assert self._encoder is not None
        num_bytes = read.image.num_tokens * self._encoder.token_bytes
        num_pieces = -(-num_bytes // producer.piece_bytes)
        held = sum(len(landing.pages) for landing in self.landing.values())
        if held + num_pieces > max(self._pages.num_pages // SHARE, 1):
            return
        source = Embeddings(read.image, num_pieces, producer.piece_bytes)
        opened = self._shared.open(
            producer, source, self._weights(), self._timeout_s + GRACE_S, num_pieces
        )
        if opened is None:
            return
        read.id, pages = opened
        read.num_pieces, read.piece_bytes = num_pieces, producer.piece_bytes
        read.due, read.epoch = now + self._timeout_s, self._encoder.epoch
        self._by_id[read.id] = read
        self.landing[read.id] = _Landing(pages)

    def _landed(self, event: CompletedEvent) -> None:
        read, landing = self._by_id.get(event.id), self.landing[event.id]
        if read is None:
            return
        if event.num_tokens != read.num_pieces:
            self._end(event.id, "failed")
            return
        assert self._encoder is not None
        read.copying = self._encoder.copy(read.image, landing.pages, read.piece_bytes, read.epoch)
        landing.copying = read.copying

    def _give_up(self, read: _Read) -> None:
        if read.id is not None:
            self._cancel(read, "the embeddings are late")
            self._finish(read, "late")
        elif read.address in self._shared.producers:
            self._finish(read, "no_capacity")
        else:
            self._is_absent(read.address)
            self._finish(read, "unpaired")

    def _is_absent(self, address: str) -> None:
        """Give up waiting reads from this encode node, and start none until it is paired."""
        if len(self._absent) >= MAX_READS:
            self._absent.clear()
        self._absent.add(address)
        for read in self.in_progress.values():
            if read.id is None and read.address == address:
                read.due = 0.0

    def _end(self, id: HandoffId, outcome: str) -> None:
        read = self._by_id.get(id)
        if read is not None:
            self._finish(read, outcome)

    def _cancel(self, read: _Read, reason: str) -> None:
        if read.id is not None and self._by_id.pop(read.id, None) is not None:
            self._port.post(CancelHandoff(read.id, reason))

    def _finish(self, read: _Read, outcome: str) -> None:
        """End a read, and the waits for it."""
        self.counts[f"embedding_reads/{outcome}"] += 1
        if read.id is not None:
            self._by_id.pop(read.id, None)
        del self.in_progress[read.image.name]
        for key in read.waiting:
            names, timings = self.waits[key]
            names.discard(read.image.name)
            timings.completed += outcome == "completed"
            if not names:
                timings.ended = self._clock()
                del self.waits[key]
                self._over[key] = None
