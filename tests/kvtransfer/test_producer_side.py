"""The producer's side: pages are announced when all ranks serve them, and opens are limited."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from common.config import TransferConfig
from common.errors import EngineFault
from common.page_tables import PageTables
from common.process.ipc import FrameSocket, socket_pair
from common.request import Remaining
from kvtransfer.backends.base import Ints, PagePool, PoolRegion, prepared
from kvtransfer.frontend_messages import PairInput, PairOpened, PairOutput, SendMessage
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
    SampledOutput,
)
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.ports import (
    AdmittedCommand,
    ClosedEvent,
    FailCommand,
    OpenedEvent,
    PublishCommand,
)
from kvtransfer.protocol.producer import ProducerEnd
from kvtransfer.transfer.device_page_bytes import page_bytes_of
from kvtransfer.transfer.paths import PageChecksums
from kvtransfer.transfer.producer import HeldMessages, ProducerSide
from kvtransfer.transfer.thread import EventOutlet
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

    def prepare(self, consumer: int) -> Sequence[Future[Any]]:
        return (prepared(),)

    def admit(self, consumer: int) -> tuple[DataPath, ...]:
        return ()

    def dismiss(self, consumer: int) -> None: ...

    def publish(self, consumer: int, pages: Ints) -> Sequence[Future[Any]]:
        replies: list[Future[Any]] = [Future(), Future()]  # a publication has two messages
        self.asked += [(consumer, pages.tolist(), reply) for reply in replies]
        return replies

    def withdraw(self, consumer: int, pages: Ints) -> None:
        self.withdrawn.append((consumer, pages.tolist()))

    def poll(self) -> None: ...

    def close(self) -> None: ...


class Producer:
    """A producer's side with two consumers, seen by their frontends and the transfer thread."""

    def __init__(
        self,
        publisher: ProducerSide,
        outlet: EventOutlet,
        front: FrameSocket[PairOutput],
        ranks: Ranks,
    ) -> None:
        self.publisher, self.outlet, self.ranks = publisher, outlet, ranks
        self.wakes = 0
        self._front = front
        self._serials = 0

    def wake(self) -> None:
        self.wakes += 1

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

    def replies(self, *numbers: int) -> None:
        for number in numbers:
            self.ranks.asked[number][2].set_result(())

    def new_messages(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """Tick, and return stream, kind and pages of new messages."""
        self.publisher.tick(0.0, engine_moves=True)
        sent = [each for each in self._front.receive() if isinstance(each, SendMessage)]
        return [
            (each.stream, type(each.message).__name__, getattr(each.message, "pages", ()))
            for each in sent
            if isinstance(each.message, (PagesReady, HandoffFailed, HandoffAdmitted))
        ]

    def refused(self) -> list[HandoffFailed]:
        """Return the failures sent since the last call."""
        sent = [each.message for each in self._front.receive() if isinstance(each, SendMessage)]
        return [message for message in sent if isinstance(message, HandoffFailed)]


@pytest.fixture
def producer() -> Iterator[Producer]:
    ours, theirs = socket_pair()
    frames: FrameSocket[PairInput] = FrameSocket(ours, PairInput)
    front: FrameSocket[PairOutput] = FrameSocket(theirs, PairOutput)
    outlet: EventOutlet = EventOutlet(frames)
    nothing = PageChecksums(page_bytes_of(PagePool(1 << 20, 4096, 16, "cpu")), 0)
    ranks, made = Ranks(), []
    publisher = ProducerSide(
        ProducerEnd(TransferConfig(), PageTables(4)),
        _hello(PRODUCER),
        ranks,
        outlet,
        lambda: made[0].wake(),
        nothing,
        max_unconsumed_tokens=MAX_TOKENS,
    )
    made.append(Producer(publisher, outlet, front, ranks))
    for consumer in (CONSUMER, OTHER):
        publisher.opened(PairOpened(consumer, _hello(consumer), False), 0.0)
    made[0].new_messages()
    yield made[0]
    frames.close()
    front.close()


# Seen failing if PagesReady is sent at once, and if only the first reply is awaited.
def test_pages_are_ready_when_all_ranks_have_replied(producer: Producer) -> None:
    serial = producer.grant(CONSUMER)
    producer.publish(serial, 9)
    assert producer.new_messages() == []
    producer.replies(0)
    assert producer.new_messages() == []
    before = producer.wakes
    producer.replies(1)
    assert producer.wakes > before
    assert producer.new_messages() == [(CONSUMER, "PagesReady", (9,))]
    assert producer.new_messages() == []


def test_messages_of_a_stream_keep_their_order(producer: Producer) -> None:
    first = producer.grant(CONSUMER)
    second = producer.grant(CONSUMER)
    producer.publish(first, 9)
    producer.publisher.command(AdmittedCommand(second, 7, 0), 0.0)
    producer.publish(first, 5, last=True)
    producer.replies(2, 3)  # the second publication's
    assert producer.new_messages() == []
    producer.replies(0, 1)
    assert [(kind, pages) for _, kind, pages in producer.new_messages()] == [
        ("PagesReady", (9,)),
        ("HandoffAdmitted", ()),
        ("PagesReady", (5,)),
    ]


def test_a_reply_that_is_missing_delays_no_other_stream(producer: Producer) -> None:
    slow = producer.grant(CONSUMER)
    quick = producer.grant(OTHER)
    producer.publish(slow, 9)
    producer.publish(quick, 5)
    producer.replies(2, 3)
    assert producer.new_messages() == [(OTHER, "PagesReady", (5,))]
    producer.replies(0, 1)
    assert producer.new_messages() == [(CONSUMER, "PagesReady", (9,))]


# Seen failing without `forget` in `ProducerSide._dismiss`.
def test_an_ended_stream_gets_no_more_messages(producer: Producer) -> None:
    serial = producer.grant(CONSUMER)
    producer.publish(serial, 9)
    producer.publisher.closed(CONSUMER, "gone")
    assert producer.ranks.withdrawn == [(CONSUMER, [9])]
    producer.replies(0, 1)
    assert producer.new_messages() == []


def test_a_failure_is_sent_after_the_pages_before_it(producer: Producer) -> None:
    serial = producer.grant(CONSUMER)
    producer.publish(serial, 9)
    producer.publisher.command(FailCommand(serial, "out of pages", False), 0.0)
    assert producer.ranks.withdrawn == [(CONSUMER, [9])]
    assert producer.new_messages() == []
    producer.replies(0, 1)
    assert [kind for _, kind, _ in producer.new_messages()] == ["PagesReady", "HandoffFailed"]


def test_a_rank_that_cannot_publish_ends_the_node(producer: Producer) -> None:
    serial = producer.grant(CONSUMER)
    producer.publish(serial, 9)
    producer.ranks.asked[0][2].set_exception(EngineFault("rank 1 cannot"))
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
def test_opens_and_cancels_during_one_step_do_not_accumulate(
    producer: Producer, num_tokens: int, fit: int
) -> None:
    for _ in range(1500):
        producer.open(CONSUMER, num_tokens, cancel=True)
    refused = producer.refused()
    assert len(refused) == 1500 - fit and all(message.retryable for message in refused)
    kinds = [type(event) for event in producer.outlet.take()]
    assert kinds == [OpenedEvent, ClosedEvent] * fit


# Seen failing if a stream's share is everything: ten opens of the other consumer are accepted, too.
def test_a_consumer_with_many_opens_leaves_others_their_share(producer: Producer) -> None:
    for _ in range(20):
        producer.open(CONSUMER, 10_000)
    producer.refused()
    for _ in range(20):
        producer.open(OTHER, 10_000)
    assert len(producer.refused()) == 15
    producer.open(CONSUMER, 10_000)
    assert len(producer.refused()) == 1


# Seen failing if `UnconsumedEvents.consumed` does nothing.
def test_handled_opens_make_room_for_others(producer: Producer) -> None:
    for _ in range(3):
        for _ in range(10):
            producer.open(CONSUMER, 10_000, cancel=True)
        assert not producer.refused()
        producer.outlet.take()


def test_a_single_open_may_have_any_length(producer: Producer) -> None:
    producer.open(CONSUMER, 2 * MAX_TOKENS)
    producer.open(OTHER, 2 * MAX_TOKENS)
    assert not producer.refused()
