"""Node.WatchCache from outside: a real frontend, and a real engine process with a real prefix
cache."""

import asyncio
import signal
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from common.errors import Overloaded
from common.requests.namespace import SHARED, Namespace, namespace_of, page_names
from engine.kv_cache.kv_events import CacheChange
from node.control.engine_control import CacheReports
from node.frontend.service import CacheFeed
from node.messages import CacheEventBatch, WatchCache
from protos import node_pb2, node_pb2_grpc, router_pb2
from tests.node.conftest import StartNode, describe, eventually
from tests.node.frontend.router_end import RouterEnd, submit
from tests.support.processes.programs import Program

PAGE_SIZE = 16


def names(tokens: "list[int]", namespace: Namespace = SHARED) -> set[int]:
    return set(page_names(tokens, PAGE_SIZE, namespace))


def prompt(number: int, num_pages: int) -> "list[int]":
    return [number] * (num_pages * PAGE_SIZE)


class Watcher:
    """One WatchCache call and its state so far. Leaving the block cancels it."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        stub = node_pb2_grpc.NodeStub(self._channel)
        self.call = stub.WatchCache(node_pb2.WatchCacheRequest())
        self.messages: list[node_pb2.CacheEvents] = []
        self.known: set[int] = set()
        self.code: grpc.StatusCode | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.call.cancel()
        self._thread.join(60)
        self._channel.close()

    def _read(self) -> None:
        try:
            for events in self.call:
                if events.cleared:
                    self.known.clear()
                self.known.difference_update(events.removed)
                self.known.update(events.stored)
                self.messages.append(events)
        except grpc.RpcError as error:
            self.code = error.code()


@pytest.fixture
def node(start_node: StartNode) -> Program:
    return start_node()


@pytest.fixture
def router(node: Program) -> Iterator[RouterEnd]:
    with RouterEnd(node.address()) as router:
        yield router


def compute(router: RouterEnd, request: int, tokens: "list[int]", **fields: Any) -> None:
    router.send(submit(request, tokens, 1, **fields))
    router.wait_for_end(request)


def test_a_watcher_gets_the_present_pages_and_then_changes(node, router):
    compute(router, 1, prompt(1, 3))
    with Watcher(node.address()) as watcher:
        eventually(lambda: watcher.known == names(prompt(1, 3)))
        assert watcher.messages[0].cleared
        compute(router, 2, [*prompt(1, 3), *prompt(2, 2), 5])
        eventually(lambda: watcher.known == names([*prompt(1, 3), *prompt(2, 2)]))
        compute(router, 3, prompt(3, 62))  # of 64 pages: most of the others are evicted
        eventually(lambda: watcher.known >= names(prompt(3, 62)) and len(watcher.known) <= 64)
        with grpc.insecure_channel(node.address()) as channel:
            node_pb2_grpc.NodeStub(channel).FlushCache(router_pb2.FlushCacheRequest(), timeout=60)
        eventually(lambda: not watcher.known)
        assert {events.page_size for events in watcher.messages} == {PAGE_SIZE}
        assert [events.cleared for events in watcher.messages].count(True) == 1


def test_names_of_pages_depend_on_their_namespace_whether_watched_or_not(node, router):
    one, other = namespace_of("one"), namespace_of("other")
    compute(router, 1, prompt(1, 3), namespace=one)
    with Watcher(node.address()) as watcher:
        eventually(lambda: watcher.known == names(prompt(1, 3), one))
        compute(router, 2, prompt(1, 4), namespace=other)
        compute(router, 3, [*prompt(1, 2), *prompt(2, 1)], namespace=one)
        known = names(prompt(1, 3), one) | names(prompt(1, 4), other)
        known |= names([*prompt(1, 2), *prompt(2, 1)], one)
        assert len(known) == 8
        eventually(lambda: watcher.known == known)


def test_each_watcher_starts_with_everything_and_gets_no_repeated_state_of_others(node, router):
    with Watcher(node.address()) as first:
        eventually(lambda: first.messages)
        compute(router, 1, prompt(1, 4))
        eventually(lambda: first.known == names(prompt(1, 4)))
        num_messages = len(first.messages)
        with Watcher(node.address()) as second:
            eventually(lambda: second.known == names(prompt(1, 4)))
            assert len(first.messages) == num_messages
            compute(router, 2, prompt(2, 2))
            both = names(prompt(1, 4)) | names(prompt(2, 2))
            eventually(lambda: first.known == both and second.known == both)
    # This includes a watcher that starts when there has been none for a while.
    compute(router, 3, prompt(3, 1))
    with Watcher(node.address()) as third:
        eventually(lambda: third.known == both | names(prompt(3, 1)))


def test_watchers_are_notified_that_their_node_ends(start_node):
    node = start_node()
    with Watcher(node.address()) as watcher:
        eventually(lambda: watcher.messages)
        node.send(signal.SIGTERM)
        eventually(lambda: watcher.code, 10.0)
        assert watcher.code is grpc.StatusCode.UNAVAILABLE


def test_a_node_that_loads_its_model_cannot_be_watched_yet(start_node):
    node = start_node("hang", ready=False)
    eventually(lambda: describe(node.address()).state == "starting")
    with Watcher(node.address()) as watcher:
        eventually(lambda: watcher.code)
        assert watcher.code is grpc.StatusCode.UNAVAILABLE


class Engine:
    """An engine link that only records its messages."""

    def __init__(self) -> None:
        self.sent: list[WatchCache] = []

    def check_ready(self) -> None:
        pass

    def send(self, message: WatchCache) -> None:
        self.sent.append(message)


def change(*watchers: int, first: int, count: int, cleared: bool = False) -> CacheEventBatch:
    pages = array("Q", range(first, first + count)).tobytes()
    return CacheEventBatch(watchers, PAGE_SIZE, cleared, pages, b"")


async def test_a_watcher_that_does_not_read_is_disconnected_and_delays_no_other():
    engine = Engine()
    feed = CacheFeed(engine)  # type: ignore[arg-type]
    read: list[node_pb2.CacheEvents] = []

    async def write(events: node_pb2.CacheEvents) -> None:
        read.append(events)

    async def stuck(events: node_pb2.CacheEvents) -> None:
        await asyncio.Event().wait()

    slow, fast = (
        asyncio.create_task(feed.watch("a", stuck)),
        asyncio.create_task(feed.watch("b", write)),
    )
    await asyncio.sleep(0)
    assert engine.sent == [WatchCache(1, True), WatchCache(2, True)]
    feed.changed(change(first=0, count=5))  # before the messages about the change
    feed.changed(change(1, 2, 3, first=0, count=10, cleared=True))
    for number in range(3000):
        feed.changed(change(first=number, count=1))
        await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await slow
    assert engine.sent[-1] == WatchCache(1, False)
    assert len(read) == 3001
    fast.cancel()
    await asyncio.gather(fast, return_exceptions=True)
    assert engine.sent[-1] == WatchCache(2, False)


# Seen failing if new watchers are rejected (the late router is one), and if the oldest of all is
# disconnected, which is the first router.
async def test_a_host_with_many_watchers_blocks_no_other():
    feed = CacheFeed(Engine())  # type: ignore[arg-type]

    async def write(_: node_pb2.CacheEvents) -> None:
        pass

    def watch(host: str) -> "asyncio.Task[None]":
        return asyncio.create_task(feed.watch(host, write))

    router = watch("router")
    await asyncio.sleep(0)
    greedy = [watch("greedy") for _ in range(100)]
    late = watch("late router")
    turned_away = set(greedy[:38])
    await asyncio.wait(turned_away)
    for task in turned_away:
        assert isinstance(task.exception(), Overloaded)
    for _ in range(100):  # any other one that was disconnected would have ended
        await asyncio.sleep(0)
    assert not any(task.done() for task in (router, late, *greedy[38:]))
    for task in (router, late, *greedy):
        task.cancel()
    await asyncio.wait({router, late, *greedy})


class Cache:
    """Counts how often it lists all its pages: two pages, one of which is new."""

    page_size = PAGE_SIZE

    def __init__(self) -> None:
        self.named = 0

    def start(self) -> None:
        self.named += 1

    def stop(self) -> None:
        pass

    def everything(self) -> CacheChange:
        self.named += 1
        return CacheChange(True, (1, 2), ())

    def take(self) -> CacheChange | None:
        return CacheChange(False, (2,), ())


def test_callers_that_reconnect_continuously_do_not_delay_steps():
    cache, reported, now = Cache(), list[CacheEventBatch](), 0.0
    reports = CacheReports(cache, reported.append, now=lambda: now)
    for number in range(1, 1001):
        reports.watch(WatchCache(number, on=True))
        reports.flush()
        if number not in (7, 1000):
            reports.watch(WatchCache(number, on=False))
        now += 1e-4
    assert cache.named <= 2
    now += 10.0
    reports.flush()
    begun = [number for message in reported for number in message.watchers]
    assert {7, 1000} <= set(begun) and len(begun) == len(set(begun))
