"""Embeddings that a prefill node reads: opening, cancelling and releasing."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from common.page_tables import PageTables
from common.requests.images import Image
from engine.batch.batch import Ints
from engine.kv_cache.pages import PageHolder
from kvtransfer.messages import CancelHandoff, Embeddings, HandoffId
from kvtransfer.ports import (
    CompletedEvent,
    FailedEvent,
    GrantCommand,
    OpenCommand,
    ProducerDown,
    ProducerUp,
    ReadsEndedEvent,
)
from node.sharing.reads import SharedReads
from node.timings import ImageReads
from prefill_node.embeddings import PAIR_S, EmbeddingReads
from tests.kvtransfer.search.sides.hand_off import PAGE_SIZE
from tests.kvtransfer.search.sides.prefix import Memory, Posts

ENCODER = "encode:50400"
UP = ProducerUp(7, ENCODER, "tcp", 1.0, piece_bytes=64)
TIMEOUT_S = 10.0
IMAGE, OTHER = (Image(0, 2, 4, bytes([colour]) * 24) for colour in (1, 2))  # 8 tokens: 2 pieces


class FakeEncoder:
    token_bytes = 16
    batches = num_waiting = 0
    epoch = 3  # when reads are opened

    def __init__(self) -> None:
        self.notify: Callable[[], None] = lambda: None
        self.cached: set[bytes] = set()
        self.copies: list[Future[None]] = []

    def missing(self, images: Sequence[Image]) -> Sequence[Image]:
        return [image for image in images if image.name not in self.cached]

    def copy(self, image: Image, pages: Ints, piece_bytes: int, epoch: int) -> Future[None]:
        assert (len(pages), piece_bytes, epoch) == (2, UP.piece_bytes, 3)
        self.copies.append(Future())
        return self.copies[-1]

    def begin(self, images: Sequence[Image]) -> None: ...

    def close(self) -> None: ...


class Rig:
    def __init__(self) -> None:
        self.now = 0.0
        self.timings: dict[int, ImageReads] = {}
        self.port, self.encoder = Posts(), FakeEncoder()
        self.memory = Memory(64, PageTables(PAGE_SIZE))
        self.shared = SharedReads(1, self.memory.cache, self.port)
        self.reads = EmbeddingReads(
            self.encoder,
            self.shared,
            self.port,
            pages=self.memory.pages,
            weights=lambda: b"",
            timeout_s=TIMEOUT_S,
            clock=lambda: self.now,
        )

    def pair(self, event: ProducerUp | ProducerDown) -> None:
        assert self.shared.note(event)
        self.reads.handle(event)

    def start(self, key: int = 1, *images: Image) -> None:
        images = images or (IMAGE,)
        self.timings[key] = ImageReads()
        self.reads.start(key, images, [ENCODER] * len(images), self.timings[key])
        self.reads.poll()

    def opened(self) -> HandoffId:
        opening, grant = self.port.take()
        assert isinstance(opening, OpenCommand) and isinstance(grant, GrantCommand)
        assert isinstance(opening.source, Embeddings) and opening.source.num_pieces == 2
        assert opening.producer == UP.instance and len(grant.destination_pages) == 2
        return opening.id

    def outcome(self, name: str) -> int:
        return self.reads.counts[f"embedding_reads/{name}"]

    @property
    def num_held(self) -> int:
        return int(self.memory.pages.holds(PageHolder.READ).sum())


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.pair(UP)
    return rig


def test_two_requests_share_one_read_and_pages_are_free_after_the_copy(rig: Rig) -> None:
    rig.start(1)
    rig.start(2)
    id = rig.opened()
    rig.encoder.epoch += 1  # by an update of the weights: the copy has the older number
    assert rig.reads.handle(CompletedEvent(id, num_tokens=2))
    assert rig.reads.handle(ReadsEndedEvent(id))
    rig.reads.poll()
    assert 1 in rig.reads.waits and rig.num_held == 2  # the copy is running
    rig.encoder.copies[0].set_result(None)
    rig.reads.poll()
    assert sorted(rig.reads.take_over()) == [1, 2]
    assert not rig.reads.landing and rig.num_held == 0 and rig.outcome("completed") == 1


def test_a_request_knows_when_and_how_many_images_were_read(rig: Rig) -> None:
    rig.encoder.cached.add(IMAGE.name)
    rig.start(1, IMAGE)
    assert not rig.timings[1].begun  # there is nothing to read
    rig.encoder.cached.clear()
    rig.now = 1.0
    rig.start(2, IMAGE, OTHER)
    commands = rig.port.take()
    first, second = (each.id for each in commands if isinstance(each, OpenCommand))
    timings = rig.timings[2]
    assert (timings.begun, timings.ended, timings.wanted) == (1.0, 0.0, 2)
    rig.now = 2.0
    rig.reads.handle(CompletedEvent(first, num_tokens=2))
    rig.encoder.copies[0].set_result(None)
    rig.reads.poll()
    assert not timings.ended
    rig.now = 3.0
    rig.reads.handle(FailedEvent(second, "lost", retryable=False))
    assert (timings.ended, timings.completed) == (3.0, 1)


def test_pages_are_kept_until_the_encode_node_confirms_them(rig: Rig) -> None:
    rig.start()
    id = rig.opened()
    rig.reads.handle(ReadsEndedEvent(id))
    rig.reads.poll()
    assert rig.num_held == 2  # no more bytes arrive, and nothing is copied yet
    rig.reads.handle(CompletedEvent(id, num_tokens=2))
    rig.encoder.copies[0].set_result(None)
    rig.reads.poll()
    assert rig.reads.take_over() == [1] and rig.num_held == 0


def test_a_cached_image_is_not_read(rig: Rig) -> None:
    rig.encoder.cached.add(IMAGE.name)
    rig.start(1, IMAGE, OTHER)
    rig.opened()
    assert not rig.port.take()


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_incomplete_embeddings_are_not_used(rig: Rig, pieces: int) -> None:
    rig.start()
    rig.reads.handle(CompletedEvent(rig.opened(), num_tokens=pieces))
    assert rig.reads.take_over() == [1] and not rig.encoder.copies
    assert rig.outcome("failed") == 1


def test_a_lost_read_keeps_its_pages_until_no_byte_can_arrive(rig: Rig) -> None:
    rig.start()
    id = rig.opened()
    assert rig.reads.handle(FailedEvent(id, "gone", retryable=True))
    rig.reads.poll()
    assert rig.reads.take_over() == [1] and rig.num_held == 2
    rig.reads.handle(ReadsEndedEvent(id))
    rig.reads.poll()
    assert rig.num_held == 0 and not rig.reads.landing


def test_a_late_encode_node_is_cancelled(rig: Rig) -> None:
    rig.start()
    id = rig.opened()
    rig.now = TIMEOUT_S
    rig.reads.poll()
    (cancel,) = rig.port.take()
    assert isinstance(cancel, CancelHandoff) and cancel.id == id
    assert rig.reads.take_over() == [1] and rig.outcome("late") == 1


def test_the_end_of_the_last_request_cancels_the_read(rig: Rig) -> None:
    rig.start(1)
    rig.start(2)
    id = rig.opened()
    rig.reads.forget(1)
    assert not rig.port.take()
    rig.reads.forget(2)
    (cancel,) = rig.port.take()
    assert isinstance(cancel, CancelHandoff) and cancel.id == id
    rig.reads.handle(ReadsEndedEvent(id))
    rig.reads.poll()
    assert rig.num_held == 0 and not rig.reads.landing


def test_a_lost_encode_node_is_not_awaited(rig: Rig) -> None:
    rig.memory.pages.allocate(63, PageHolder.REQUEST)  # so that the read is not opened
    rig.start(1)
    rig.pair(ProducerDown(UP.instance, ENCODER, "lost"))
    rig.reads.poll()
    assert rig.reads.take_over() == [1]
    rig.start(2)
    assert 2 not in rig.reads.waits and rig.outcome("unpaired") == 2


def test_an_encode_node_that_does_not_pair_is_awaited_once() -> None:
    rig = Rig()
    rig.start()
    assert 1 in rig.reads.waits
    rig.now = PAIR_S
    rig.reads.poll()
    assert rig.reads.take_over() == [1]
    rig.start(2)
    assert 2 not in rig.reads.waits and rig.outcome("unpaired") == 2
    rig.pair(UP)
    rig.start(3)
    rig.opened()


def test_a_read_waits_for_pages_for_a_limited_time(rig: Rig) -> None:
    rig.memory.pages.allocate(63, PageHolder.REQUEST)
    rig.start()
    assert not rig.port.take()
    rig.now = PAIR_S
    rig.reads.poll()
    assert rig.reads.take_over() == [1] and rig.outcome("no_capacity") == 1
