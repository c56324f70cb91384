"""Consumers whose paths take time to prepare: content and time of the producer's response."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.config import TransferConfig
from common.errors import TransferError
from common.page_tables import PageTables
from common.process.ipc import FrameSocket, socket_pair
from kvtransfer.backends.base import PagePool, PageProducer, PoolRegion, prepared
from kvtransfer.frontend_messages import EndStream, PairInput, PairOpened, PairOutput, SendMessage
from kvtransfer.pairing import PairHello
from kvtransfer.pairs.dialer import DialTimes
from kvtransfer.protocol.producer import ProducerEnd
from kvtransfer.transfer.device_page_bytes import page_bytes_of
from kvtransfer.transfer.paths import PageChecksums
from kvtransfer.transfer.producer import WAIT_S, ProducerSide
from kvtransfer.transfer.rank_paths import RankOffers
from kvtransfer.transfer.thread import EventOutlet

PRODUCER, CONSUMER, OTHER = 1, 2, 3  # instances


class Slow:
    """A producer that prepares the consumers' paths when the test asks for it."""

    publications = None

    def __init__(self) -> None:
        self.preparations: dict[int, Future[Any]] = {}  # by consumer that is not dismissed

    def prepare(self, consumer: int) -> Future[Any]:
        self.preparations[consumer] = Future()
        return self.preparations[consumer]

    def admit(self, consumer: int) -> bytes:
        if not self.preparations[consumer].done():
            raise TransferError("not ready")
        return b"own"

    def dismiss(self, consumer: int) -> None:
        self.preparations.pop(consumer, None)

    def poll(self) -> None: ...

    def close(self) -> None: ...


class Quick(Slow):
    def prepare(self, consumer: int) -> Future[Any]:
        self.preparations[consumer] = prepared()
        return self.preparations[consumer]


@dataclass
class Rig:
    publisher: ProducerSide
    front: FrameSocket[PairOutput]
    slow: Slow
    wakes: list[None] = field(default_factory=list)

    def open(self, stream: int, instance: int, now: float = 0.0) -> None:
        self.publisher.opened(PairOpened(stream, _hello(instance), False), now)

    def tick(self, now: float) -> dict[int, list[str]]:
        """Return the names of the paths offered by now, by answered stream."""
        self.publisher.tick(now, engine_moves=True)
        said = [each for each in self.front.receive() if isinstance(each, SendMessage)]
        return {each.stream: [path.backend for path in each.message.paths] for each in said}


def _hello(instance: int) -> PairHello:
    return PairHello(instance, 2, {}, (), (PoolRegion(4096, 512, 8),), "here")


@pytest.fixture
def rig() -> Iterator[Rig]:
    ours, theirs = socket_pair()
    frames: FrameSocket[PairInput] = FrameSocket(ours, PairInput)
    front: FrameSocket[PairOutput] = FrameSocket(theirs, PairOutput)
    producers: dict[str, PageProducer] = {"slow": Slow(), "quick": Quick()}
    wakes: list[None] = []
    end = ProducerEnd(TransferConfig(), PageTables(4))
    nothing = PageChecksums(page_bytes_of(PagePool(1 << 20, 4096, 16, "cpu")), 0)
    publisher = ProducerSide(
        end,
        _hello(PRODUCER),
        RankOffers(0, lambda: producers),
        EventOutlet(frames),
        lambda: wakes.append(None),
        nothing,
    )
    slow = producers["slow"]
    assert isinstance(slow, Slow)
    yield Rig(publisher, front, slow, wakes)
    frames.close()
    front.close()


# Seen failing without `add_done_callback` in `ConsumerAdmissions.begin`: nothing wakes the thread.
def test_a_consumer_is_answered_when_all_its_paths_are_ready(rig):
    rig.open(1, CONSUMER)
    rig.open(2, OTHER)
    assert rig.tick(0.1) == {}
    rig.wakes.clear()
    rig.slow.preparations[2].set_result(None)
    assert rig.wakes
    assert rig.tick(0.2) == {2: ["slow", "quick"]}
    rig.slow.preparations[1].set_result(None)
    assert rig.tick(0.3) == {1: ["slow", "quick"]}
    assert rig.tick(0.4) == {}


# Seen failing with no deadline in `take_ready`.
def test_a_path_that_is_not_ready_in_time_is_left_out(rig):
    rig.open(1, CONSUMER, now=5.0)
    deadline = rig.publisher.next_deadline()
    assert deadline is not None and deadline <= 5.0 + WAIT_S
    assert rig.tick(5.0 + WAIT_S - 0.1) == {}
    assert rig.tick(5.0 + WAIT_S) == {1: ["quick"]}


def test_a_producer_times_out_before_its_consumers():
    assert DialTimes().hello_s >= WAIT_S + 5


# Seen failing without `forget` in `ProducerSide._dismiss`.
def test_a_consumer_that_disconnects_before_it_is_ready_is_dismissed_and_not_answered(rig):
    rig.open(1, CONSUMER)
    being_made = rig.slow.preparations[1]
    rig.publisher.closed(1, "gone")
    assert not rig.slow.preparations
    being_made.set_result(None)
    assert rig.tick(0.1) == {}
    assert rig.tick(WAIT_S) == {}


# Seen failing without the loop over `streams_of` in `ProducerSide.opened`: the older stream comes
# up last, and ends the newer one.
def test_of_two_streams_of_a_waiting_consumer_the_newer_is_kept(rig):
    rig.open(1, CONSUMER)
    rig.open(2, CONSUMER)
    (ended,) = (each for each in rig.front.receive() if isinstance(each, EndStream))
    assert ended.stream == 1 and "opened another stream" in ended.reason and not ended.refused
    assert rig.slow.preparations.keys() == {2}
    rig.slow.preparations[2].set_result(None)
    assert rig.tick(0.1) == {2: ["slow", "quick"]}
    rig.publisher.closed(1, "ended")
    assert rig.slow.preparations.keys() == {2}
