"""The producer's side: consumers are answered when their paths are ready, pages are announced when
all ranks serve them, and opens are limited."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from common.config import TransferConfig
from common.errors import EngineFault, TransferError
from common.page_tables import PageTables
from common.process.ipc import FrameSocket, socket_pair
from common.request import Remaining
from kvtransfer.backends.base import Ints, PagePool, PageProducer, PoolRegion, prepared
from kvtransfer.frontend_messages import EndStream, PairInput, PairOutput, SendMessage
from kvtransfer.messages import (
    CancelHandoff,
    GrantHandoff,
    HandoffAdmitted,
    HandoffFailed,
    HandoffId,
    Heartbeat,
    OpenHandoff,
    PagesReady,
    Prompt,
    ReadsDone,
    SampledOutput,
)
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.pairs.dialer import DialTimes
from kvtransfer.ports import (
    AdmittedCommand,
    ClosedEvent,
    FailCommand,
    OpenedEvent,
    PublishCommand,
)
from kvtransfer.protocol.producer import ProducerEnd
from kvtransfer.protocol.progress import EventOutlet
from kvtransfer.transfer.device_page_bytes import page_bytes_of
from kvtransfer.transfer.paths import PageChecksums, PathOffers
from kvtransfer.transfer.producer import WAIT_S, HeldMessages, ProducerSide
from kvtransfer.transfer.rank_paths import RankOffers
from tests.support.specs import make_spec

PRODUCER, CONSUMER, OTHER = 1, 2, 3  # instances, and streams of the consumers
MAX_TOKENS = 100_000  # in opens that the engine has not handled


def _hello(instance: int) -> PairHello:
    return PairHello(instance, 2, {}, (), (PoolRegion(4096, 512, 16),), "here")


class Ranks:
    """The paths of a node whose followers reply when the test asks for it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int], Future[Any]]] = []  # consumer, pages, reply
        self.withdrawn: list[tuple[int, list[int]]] = []
        self.dismissed: list[int] = []

    def prepare(self, consumer: int) -> Sequence[Future[Any]]:
        return (prepared(),)

    def admit(self, consumer: int) -> tuple[DataPath, ...]:
        return ()

    def dismiss(self, consumer: int) -> None:
        self.dismissed.append(consumer)

    def publish(self, consumer: int, pages: Ints) -> Sequence[Future[Any]]:
        replies: list[Future[Any]] = [Future(), Future()]  # a publication has two messages
        self.asked += [(consumer, pages.tolist(), reply) for reply in replies]
        return replies

    def withdraw(self, consumer: int, pages: Ints) -> None:
        assert consumer not in self.dismissed
        self.withdrawn.append((consumer, pages.tolist()))

    def replies(self, *numbers: int) -> None:
        for number in numbers:
            self.asked[number][2].set_result(())

    def poll(self) -> None: ...

    def close(self) -> Sequence[Future[Any]]:
        return ()

    def open(self) -> Sequence[Future[Any]]:
        return ()


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


class Producer:
    """A producer's side, seen by its frontend and its transfer thread."""

    def __init__(self, offers: PathOffers) -> None:
        ours, theirs = socket_pair()
        self._frames: FrameSocket[PairInput] = FrameSocket(ours, PairInput)
        self._front: FrameSocket[PairOutput] = FrameSocket(theirs, PairOutput)
        self.outlet = EventOutlet(self._frames.send)
        self.publisher = ProducerSide(
            ProducerEnd(TransferConfig(), PageTables(4)),
            _hello(PRODUCER),
            offers,
            self.outlet,
            self._wake,
            PageChecksums(page_bytes_of(PagePool(1 << 20, 4096, 16, "cpu")), 0),
            max_unconsumed_tokens=MAX_TOKENS,
        )
        self.wakes = 0
        self._serials = 0

    def _wake(self) -> None:
        self.wakes += 1

    def close(self) -> None:
        self._frames.close()
        self._front.close()

    def connect(self, stream: int, instance: int, now: float = 0.0) -> None:
        self.publisher.opened(stream, _hello(instance), now)

    def sent(self) -> list[Any]:
        """Return everything sent to the frontend since the last call."""
        return list(self._front.receive())

    def tick(self, now: float) -> dict[int, list[str]]:
        """Return the names of the paths offered by now, by answered stream."""
        self.publisher.tick(now, engine_moves=True)
        said = [each for each in self.sent() if isinstance(each, SendMessage)]
        return {each.stream: [path.backend for path in each.message.paths] for each in said}

    def open(self, stream: int, num_tokens: int = 7, *, cancel: bool = False) -> HandoffId:
        self._serials += 1
        id = HandoffId(stream, self._serials, 1)
        prompt = Prompt(make_spec([7] * num_tokens))
        self.publisher.received(stream, OpenHandoff(id, b"", Remaining(60.0), prompt), 0.0)
        if cancel:
            self.publisher.received(stream, CancelHandoff(id, "changed its mind"), 0.0)
        return id

    def grant(self, stream: int) -> int:
        """Open and grant a hand-off of 7 tokens, and return its serial number."""
        self.publisher.received(stream, GrantHandoff(self.open(stream), 0), 0.0)
        return self._serials

    def publish(self, serial: int, page: int, *, last: bool = False) -> None:
        start, end = (4, 7) if last else (0, 4)
        pages = np.array([page], np.int32)
        self.publisher.command(
            PublishCommand(serial, start, end, pages, last, SampledOutput(42) if last else None),
            0.0,
        )

    def new_messages(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """Tick, and return stream, kind and pages of new messages."""
        self.publisher.tick(0.0, engine_moves=True)
        sent = [each for each in self.sent() if isinstance(each, SendMessage)]
        return [
            (each.stream, type(each.message).__name__, getattr(each.message, "pages", ()))
            for each in sent
            if isinstance(each.message, (PagesReady, HandoffFailed, HandoffAdmitted))
        ]

    def refused(self) -> list[HandoffFailed]:
        """Return the failures sent since the last call."""
        sent = [each.message for each in self.sent() if isinstance(each, SendMessage)]
        return [message for message in sent if isinstance(message, HandoffFailed)]


@pytest.fixture
def make() -> Iterator[Callable[[PathOffers], Producer]]:
    made: list[Producer] = []

    def make(offers: PathOffers) -> Producer:
        made.append(Producer(offers))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def producer(make: Callable[[PathOffers], Producer], ranks: Ranks) -> Producer:
    """Return a producer with two consumers."""
    producer = make(ranks)
    for consumer in (CONSUMER, OTHER):
        producer.connect(consumer, consumer)
    producer.sent()
    return producer


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def preparing(make: Callable[[PathOffers], Producer], slow: Slow) -> Producer:
    """Return a producer whose first path takes time to prepare."""
    producers: dict[str, PageProducer] = {"slow": slow, "quick": Quick()}
    return make(RankOffers(0, lambda: producers))


# Consumers that wait for their paths


# Seen failing without `add_done_callback` in `ConsumerAdmissions.begin`: nothing wakes the thread.
def test_a_consumer_is_answered_when_all_its_paths_are_ready(preparing, slow):
    preparing.connect(1, CONSUMER)
    preparing.connect(2, OTHER)
    assert preparing.tick(0.1) == {}
    before = preparing.wakes
    slow.preparations[2].set_result(None)
    assert preparing.wakes > before
    assert preparing.tick(0.2) == {2: ["slow", "quick"]}
    slow.preparations[1].set_result(None)
    assert preparing.tick(0.3) == {1: ["slow", "quick"]}
    assert preparing.tick(0.4) == {}


# Seen failing with no deadline in `take_ready`.
def test_a_path_that_is_not_ready_in_time_is_left_out(preparing):
    preparing.connect(1, CONSUMER, now=5.0)
    deadline = preparing.publisher.next_deadline()
    assert deadline is not None and deadline <= 5.0 + WAIT_S
    assert preparing.tick(5.0 + WAIT_S - 0.1) == {}
    assert preparing.tick(5.0 + WAIT_S) == {1: ["quick"]}


def test_a_producer_times_out_before_its_consumers():
    assert DialTimes().hello_s >= WAIT_S + 5


# Seen failing without `forget` in `ProducerSide._dismiss`.
def test_a_consumer_that_disconnects_before_it_is_ready_is_dismissed_and_not_answered(
    preparing, slow
):
    preparing.connect(1, CONSUMER)
    being_made = slow.preparations[1]
    preparing.publisher.closed(1, "gone")
    assert not slow.preparations
    being_made.set_result(None)
    assert preparing.tick(0.1) == {}
    assert preparing.tick(WAIT_S) == {}


# Seen failing without the loop over `streams_of` in `ProducerSide.opened`: the older stream comes
# up last, and ends the newer one.
def test_of_two_streams_of_a_waiting_consumer_the_newer_is_kept(preparing, slow):
    preparing.connect(1, CONSUMER)
    preparing.connect(2, CONSUMER)
    (ended,) = (each for each in preparing.sent() if isinstance(each, EndStream))
    assert ended.stream == 1 and "opened another stream" in ended.reason and not ended.refused
    assert slow.preparations.keys() == {2}
    slow.preparations[2].set_result(None)
    assert preparing.tick(0.1) == {2: ["slow", "quick"]}
    preparing.publisher.closed(1, "ended")
    assert slow.preparations.keys() == {2}


# Seen failing without the loop after the actions in `ProducerSide._carry_out`. `Ranks.withdraw`
# checks the order.
def test_a_consumer_whose_stream_the_node_ends_is_dismissed_before_the_frontend_reports_it(
    producer, ranks
):
    serial = producer.grant(CONSUMER)
    producer.publish(serial, 9)
    id = HandoffId(CONSUMER, serial, 1)
    producer.publisher.received(CONSUMER, ReadsDone(id), 0.0)  # before its last Ready
    assert ranks.withdrawn == [(CONSUMER, [9])] and ranks.dismissed == [CONSUMER]


# Pages that followers publish


# Seen failing if PagesReady is sent at once, and if only the first reply is awaited.
def test_pages_are_ready_when_all_ranks_have_replied(producer, ranks):
    serial = producer.grant(CONSUMER)
    producer.publish(serial, 9)
    assert producer.new_messages() == []
    ranks.replies(0)
    assert producer.new_messages() == []
    before = producer.wakes
    ranks.replies(1)
    assert producer.wakes > before
    assert producer.new_messages() == [(CONSUMER, "PagesReady", (9,))]
    assert producer.new_messages() == []


def test_messages_of_a_stream_keep_their_order(producer, ranks):
    first = producer.grant(CONSUMER)
    second = producer.grant(CONSUMER)
    producer.publish(first, 9)
    producer.publisher.command(AdmittedCommand(second, 7, 0), 0.0)
    producer.publish(first, 5, last=True)
    ranks.replies(2, 3)  # the second publication's
    assert producer.new_messages() == []
    ranks.replies(0, 1)
    assert [(kind, pages) for _, kind, pages in producer.new_messages()] == [
        ("PagesReady", (9,)),
        ("HandoffAdmitted", ()),
        ("PagesReady", (5,)),
    ]


def test_a_reply_that_is_missing_delays_no_other_stream(producer, ranks):
    slow = producer.grant(CONSUMER)
    quick = producer.grant(OTHER)
    producer.publish(slow, 9)
    producer.publish(quick, 5)
    ranks.replies(2, 3)
    assert producer.new_messages() == [(OTHER, "PagesReady", (5,))]
    ranks.replies(0, 1)
    assert producer.new_messages() == [(CONSUMER, "PagesReady", (9,))]


# Seen failing without `forget` in `ProducerSide._dismiss`.
def test_an_ended_stream_gets_no_more_messages(producer, ranks):
    serial = producer.grant(CONSUMER)
    producer.publish(serial, 9)
    producer.publisher.closed(CONSUMER, "gone")
    assert ranks.withdrawn == [(CONSUMER, [9])]
    ranks.replies(0, 1)
    assert producer.new_messages() == []


def test_a_failure_is_sent_after_the_pages_before_it(producer, ranks):
    serial = producer.grant(CONSUMER)
    producer.publish(serial, 9)
    producer.publisher.command(FailCommand(serial, "out of pages", False), 0.0)
    assert ranks.withdrawn == [(CONSUMER, [9])]
    assert producer.new_messages() == []
    ranks.replies(0, 1)
    assert [kind for _, kind, _ in producer.new_messages()] == ["PagesReady", "HandoffFailed"]


def test_a_rank_that_cannot_publish_ends_the_node(producer, ranks):
    serial = producer.grant(CONSUMER)
    producer.publish(serial, 9)
    ranks.asked[0][2].set_exception(EngineFault("rank 1 cannot"))
    with pytest.raises(EngineFault, match="rank 1 cannot"):
        producer.new_messages()


def test_messages_without_a_wait_are_sent_at_once() -> None:
    sent: list[tuple[int, Any]] = []
    held, until = HeldMessages(sent.append), Future[Any]()
    messages = [SendMessage(CONSUMER, Heartbeat(number, 0)) for number in range(3)]
    held.send(messages[0])
    assert sent == messages[:1]
    held.hold(CONSUMER, until)
    held.send(messages[1])
    held.flush()
    assert len(sent) == 1
    until.set_result(None)
    held.flush()
    held.send(messages[2])
    assert sent == messages


# Opens during a step of the engine thread, which handles none


# Seen failing if `UnconsumedEvents.fits` is always true: nothing is rejected.
@pytest.mark.parametrize("num_tokens, fit", [(10_000, 10), (1, 97)])
def test_opens_and_cancels_during_one_step_do_not_accumulate(producer, num_tokens, fit):
    for _ in range(1500):
        producer.open(CONSUMER, num_tokens, cancel=True)
    refused = producer.refused()
    assert len(refused) == 1500 - fit and all(message.retryable for message in refused)
    kinds = [type(event) for event in producer.outlet.take()]
    assert kinds == [OpenedEvent, ClosedEvent] * fit


# Seen failing if a stream's share is everything: ten opens of the other consumer are accepted, too.
def test_a_consumer_with_many_opens_leaves_others_their_share(producer):
    for _ in range(20):
        producer.open(CONSUMER, 10_000)
    producer.refused()
    for _ in range(20):
        producer.open(OTHER, 10_000)
    assert len(producer.refused()) == 15
    producer.open(CONSUMER, 10_000)
    assert len(producer.refused()) == 1


# Seen failing if `UnconsumedEvents.consumed` does nothing.
def test_handled_opens_make_room_for_others(producer):
    for _ in range(3):
        for _ in range(10):
            producer.open(CONSUMER, 10_000, cancel=True)
        assert not producer.refused()
        producer.outlet.take()


def test_a_single_open_may_have_any_length(producer):
    producer.open(CONSUMER, 2 * MAX_TOKENS)
    producer.open(OTHER, 2 * MAX_TOKENS)
    assert not producer.refused()
