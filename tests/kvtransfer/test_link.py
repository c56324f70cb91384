"""Links as the one thread that uses them sees them. Over loopback, with producers that the test
controls."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar

import numpy as np
import pytest

from common.errors import EngineFault, Overloaded, TransferError
from kvtransfer.backends.base import BackendConnection, Ints
from kvtransfer.messages import HandoffId
from kvtransfer.ports import PagesToRead, TablePages
from kvtransfer.transfer import link as link_module
from kvtransfer.transfer.link import (
    Link,
    LinkBytes,
    LinkClosed,
    LinkEvent,
    LinkLimits,
    LinkRate,
    LinkUp,
    RateMeasured,
    ReadEnded,
)
from tests.support.network.data_children import CANARY, CONSUMER, Memory, NearProducer
from tests.support.network.loopback import LoopbackBackend, LoopbackFaults

NUM_PAGES, PAGE_BYTES = 64, 4096
PRODUCER = 1
ALL = np.arange(NUM_PAGES, dtype=np.int32)
Event = TypeVar("Event", LinkUp, RateMeasured, ReadEnded, LinkClosed)


def handoff(number: int) -> HandoffId:
    return HandoffId(CONSUMER, number, 1)


def pages(source: Ints, destination: Ints) -> PagesToRead:
    """Return pages of the only table."""
    return PagesToRead(source, destination, (TablePages(0, len(source)),))


class Rig:
    """A producer, a pool, and the events of the links between them."""

    def __init__(self, exits: ExitStack) -> None:
        self.backend = LoopbackBackend()
        self.producer = NearProducer(self.backend, NUM_PAGES, PAGE_BYTES, seed=PRODUCER)
        self.producer.publish_all()
        self.memory = Memory(NUM_PAGES, PAGE_BYTES)
        self.events: queue.Queue[LinkEvent] = queue.Queue()
        self._exits = exits

    @property
    def faults(self) -> LoopbackFaults:
        return self.backend.faults(PRODUCER)

    def connect(self) -> BackendConnection:
        return self.backend.connect(self.producer.admit(), self.producer.remote, self.memory.pool)

    def link(
        self,
        connect: Callable[[], BackendConnection] | None = None,
        *,
        read_s: float = 30.0,
        max_jobs: int = 100,
        take_memory: Callable[[int], None] = lambda page: None,
    ) -> Link:
        link = Link(
            PRODUCER,
            connect or self.connect,
            self.events.put,
            num_bytes=LinkBytes(PAGE_BYTES),
            limits=LinkLimits(read_s, max_jobs=max_jobs),
            take_memory=take_memory,
        )
        self._exits.callback(link.join, 60.0)
        self._exits.callback(link.close, "the test ends")
        return link

    def next(self, kind: type[Event]) -> Event:
        event = self.events.get(timeout=60)
        assert isinstance(event, kind), event
        return event

    def nothing_more(self) -> bool:
        return self.events.empty()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as exits:
        yield Rig(exits)


def test_reads_run_in_order_and_deliver_their_pages(rig):
    link = rig.link()
    link.post(handoff(1), pages(ALL[:10], ALL[20:30]))  # allowed before it is up
    up = rig.next(LinkUp)
    assert up.path == "loopback" and up.gib_per_s > 0
    link.post(handoff(2), pages(ALL[10:14], ALL[:4]))
    link.post(handoff(1), pages(ALL[30:], ALL[30:]))
    ended = [rig.next(ReadEnded) for _ in range(3)]
    assert [(e.handoff.request, e.num_bytes, e.refused) for e in ended] == [
        (1, 10 * PAGE_BYTES, ""),
        (2, 4 * PAGE_BYTES, ""),
        (1, 34 * PAGE_BYTES, ""),
    ]
    assert (rig.memory.pages[20:30] == rig.producer.content[:10]).all()
    assert (rig.memory.pages[:4] == rig.producer.content[10:14]).all()


def test_memory_for_expected_pages_is_allocated_and_reads_go_first(rig):
    taken: queue.Queue[tuple[int, bool]] = queue.Queue()
    begun, may_go_on = threading.Event(), threading.Event()

    def take_memory(page: int) -> None:
        taken.put((page, rig.nothing_more()))
        begun.set()
        assert may_go_on.wait(60)

    link = rig.link(take_memory=take_memory)
    rig.next(LinkUp)
    link.expect(ALL[7:9])
    assert begun.wait(60)
    link.post(handoff(1), pages(ALL[:2], ALL[20:22]))
    may_go_on.set()
    assert [taken.get(timeout=60) for _ in range(2)] == [(7, True), (8, False)]
    assert rig.next(ReadEnded).num_bytes == 2 * PAGE_BYTES and rig.nothing_more()


def test_a_rejected_read_affects_no_other(rig):
    link = rig.link()
    rig.producer.withdraw(CONSUMER, ALL[5:6])
    for number, some in enumerate((ALL[:5], ALL[5:7], ALL[7:9])):
        link.post(handoff(number), pages(some, some))
    rig.next(LinkUp)
    refusals = [rig.next(ReadEnded).refused for _ in range(3)]
    assert [bool(refusal) for refusal in refusals] == [False, True, False]
    assert "page 5" in refusals[1]


@pytest.mark.parametrize("half_landed", [False, True])
def test_a_failed_read_fails_all_queued_reads_and_ends_the_link(rig, half_landed):
    link = rig.link()
    rig.next(LinkUp)
    rig.faults.freeze()
    for number in range(4):
        link.post(handoff(number), pages(ALL, ALL))
    assert rig.faults.wait_until_resting(1, 60)
    (rig.faults.truncate_next if half_landed else rig.faults.fail_next)("cut")
    rig.faults.release()
    assert rig.next(ReadEnded).handoff == handoff(0)
    closed = rig.next(LinkClosed)
    assert closed.reason == "cut"
    assert closed.unfinished == (handoff(1), handoff(2), handoff(3))
    with pytest.raises(TransferError, match="cut"):
        link.post(handoff(9), pages(ALL, ALL))
    assert link.join(60) and rig.nothing_more()


# Seen failing if `close` itself sends LinkClosed: the paused copy writes its other half.
def test_closing_ends_a_running_read_and_nothing_is_written_afterwards(rig):
    link = rig.link()
    rig.next(LinkUp)
    rig.faults.freeze()
    link.post(handoff(1), pages(ALL, ALL))
    link.post(handoff(2), pages(ALL, ALL))
    assert rig.faults.wait_until_resting(1, 60)
    link.close("enough")
    link.close("a second reason")
    closed = rig.next(LinkClosed)
    assert closed.reason == "enough" and closed.unfinished == (handoff(1), handoff(2))
    rig.memory.pages[:] = CANARY
    rig.faults.release()
    assert link.join(60)
    assert (rig.memory.pages == CANARY).all()
    assert rig.nothing_more()


def _probes(rig: Rig, *gib_per_s: float) -> Callable[[], BackendConnection]:
    """Connect to the producer. The first probes have these rates, and all later ones the last
    rate."""
    left = deque(gib_per_s)

    def connect() -> BackendConnection:
        connection = rig.connect()
        connection.probe = lambda: left.popleft() if len(left) > 1 else left[0]  # type: ignore
        return connection

    return connect


def test_an_idle_link_with_a_slow_first_probe_is_probed_again(rig, monkeypatch):
    monkeypatch.setattr(link_module, "FIRST_PROBE_S", 0.01)
    rig.link(_probes(rig, 0.19, 0.2, 3.0))
    assert rig.next(LinkUp).gib_per_s == 0.19
    assert [rig.next(RateMeasured).gib_per_s for _ in range(3)] == [0.2, 3.0, 3.0]


def test_reads_update_the_rate_of_a_link(rig, monkeypatch):
    monkeypatch.setattr(link_module, "LEAST_BYTES", NUM_PAGES * PAGE_BYTES)
    link = rig.link(_probes(rig, 1e-9))
    rig.next(LinkUp)
    link.post(handoff(1), pages(ALL[:-1], ALL[:-1]))  # too short to measure
    rig.next(ReadEnded)
    link.post(handoff(2), pages(ALL, ALL))
    ended = rig.next(ReadEnded)
    expected = NUM_PAGES * PAGE_BYTES / 2**30 / ended.seconds
    assert rig.next(RateMeasured).gib_per_s == pytest.approx(expected)
    assert rig.nothing_more()


def test_the_rate_is_the_best_of_the_last_measurements():
    rate = LinkRate(4.0, now=0.0)
    num_bytes, slow_s = 2 << 20, (2 << 20) / 2**30  # 1 GiB/s
    for number in range(1, link_module.WINDOW):
        assert not rate.read(num_bytes, slow_s, float(number))
    assert rate.gib_per_s == 4.0
    assert rate.read(num_bytes, slow_s, 8.0)
    assert rate.gib_per_s == pytest.approx(1.0)
    assert not rate.read(num_bytes, slow_s / 1.2, 9.0)  # unchanged
    assert rate.read(num_bytes, slow_s / 2.0, 10.0)


def test_an_idle_link_is_probed_ever_less_often_and_reads_postpone_probes():
    rate, now = LinkRate(1.0, now=0.0), 0.0
    waits = []
    for _ in range(8):
        waits.append(rate.probe_at - now)
        now = rate.probe_at
        rate.probed(1.0, now)
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    rate.read(2 << 20, 0.01, now + 299.0)
    assert rate.probe_at == now + 599.0


# Seen failing without the comparison with `now` in `expire`.
def test_a_read_past_its_deadline_closes_only_its_link(rig):
    link = rig.link(read_s=30.0)
    gib_per_s = rig.next(LinkUp).gib_per_s
    assert link.deadline is None
    link.expire(time.monotonic() + 1e9)
    rig.faults.freeze()
    posted_at = time.monotonic()
    link.post(handoff(1), pages(ALL, ALL))
    assert rig.faults.wait_until_resting(1, 60)
    deadline = link.deadline
    assert deadline is not None
    allowed_s = 30.0 + NUM_PAGES * PAGE_BYTES / (0.1 * gib_per_s * 2**30)
    assert posted_at + allowed_s <= deadline <= time.monotonic() + allowed_s
    link.expire(deadline - 0.001)
    link.post(handoff(2), pages(ALL, ALL))  # raises if the link is closing
    link.expire(deadline)
    closed = rig.next(LinkClosed)
    assert "deadline" in closed.reason and closed.unfinished == (handoff(1), handoff(2))


def test_a_probe_has_a_deadline_like_a_read(rig):
    probing, stopped = threading.Event(), threading.Event()

    class Stuck:
        path = "stuck"

        def probe(self) -> float:
            probing.set()
            assert stopped.wait(60)
            raise TransferError("stopped")

        def copy(self, source_pages: object, destination_pages: object) -> None: ...

        def stop(self) -> None:
            stopped.set()

        def close(self) -> None: ...

    link = rig.link(Stuck, read_s=5.0)
    assert probing.wait(60)
    deadline = link.deadline
    assert deadline is not None and deadline <= time.monotonic() + 5.0
    link.expire(deadline)
    assert "deadline" in rig.next(LinkClosed).reason


def test_a_full_queue_is_reported(rig):
    link = rig.link(max_jobs=3)
    rig.next(LinkUp)
    rig.faults.freeze()
    for number in range(3):
        link.post(handoff(number), pages(ALL, ALL))
    with pytest.raises(Overloaded):
        link.post(handoff(3), pages(ALL, ALL))
    assert rig.faults.wait_until_resting(1, 60)
    rig.faults.release()
    assert [rig.next(ReadEnded).handoff.request for _ in range(3)] == [0, 1, 2]
    link.post(handoff(3), pages(ALL, ALL))
    assert rig.next(ReadEnded).handoff == handoff(3)


# Seen failing with LinkUp after the close.
def test_close_does_not_wait_for_a_running_connect(rig):
    entered, proceed = threading.Event(), threading.Event()

    def slow() -> BackendConnection:
        entered.set()
        assert proceed.wait(60)
        return rig.connect()

    link = rig.link(slow)
    assert entered.wait(60)
    link.post(handoff(1), pages(ALL, ALL))
    link.close("changed my mind")
    assert rig.nothing_more()
    proceed.set()
    closed = rig.next(LinkClosed)
    assert closed.reason == "changed my mind" and closed.unfinished == (handoff(1),)
    assert (rig.memory.pages == CANARY).all()


def test_a_failed_producer_closes_the_link(rig):
    link = rig.link()
    rig.next(LinkUp)
    rig.faults.freeze()
    link.post(handoff(1), pages(ALL, ALL))
    assert rig.faults.wait_until_resting(1, 60)
    rig.producer.end()
    assert rig.next(LinkClosed).unfinished == (handoff(1),)


def test_an_error_of_the_backend_closes_the_link(rig, monkeypatch):
    faults: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: faults.append(hook.exc_value))
    link = rig.link()
    rig.next(LinkUp)
    link.post(handoff(1), pages(ALL[:1], np.array([NUM_PAGES], np.int32)))
    assert rig.next(LinkClosed).unfinished == (handoff(1),)
    assert link.join(60)
    assert [type(fault) for fault in faults] == [EngineFault]


def test_two_links_to_one_producer_are_independent(rig):
    first, second = rig.link(), rig.link()
    for _ in range(2):
        rig.next(LinkUp)
    first.close("no longer needed")
    assert rig.next(LinkClosed).reason == "no longer needed"
    second.post(handoff(1), pages(ALL, ALL))
    assert rig.next(ReadEnded).handoff == handoff(1)
    assert (rig.memory.pages == rig.producer.content).all()
