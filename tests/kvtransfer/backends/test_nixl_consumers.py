"""Agents of single consumers. The path stands in for RDMA: real agents, other transports."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import TransferError
from kvtransfer.backends.base import BackendConnection, PagePool
from kvtransfer.backends.nixl.agent import NixlAgent, NixlDescription, NixlHostMemory
from kvtransfer.backends.nixl.backend import ConsumerAgents, NixlBackend, NixlProducer
from kvtransfer.backends.nixl.paths import PATHS, PathKind
from kvtransfer.backends.path_proof import HostEvidence
from tests.support.network.data_children import KEYED, KeyedNixl, Memory, scattered
from tests.support.network.data_ends import closing, wait_for

pytestmark = pytest.mark.usefixtures("one_sided")

NUM_PAGES, PAGE_BYTES = 64, 16384
WAIT_S = 60.0
KEYED_CMA = replace(PATHS[0], keyed=True)


class Copies:
    """Reads all pages of a producer repeatedly, and records whether every byte was right."""

    def __init__(
        self, connection: BackendConnection, memory: Memory, expected: NDArray[np.uint8]
    ) -> None:
        self.num_right = 0
        self.error = ""
        self._stopped = threading.Event()
        self._arguments = connection, memory, expected
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection, memory, expected = self._arguments
        source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
        try:
            while not self._stopped.is_set():
                memory.pages[:] = 0
                connection.copy(source, destination)
                assert (memory.pages[destination] == expected[source]).all()
                self.num_right += 1
        except (TransferError, AssertionError) as error:
            self.error = repr(error)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


# Seen failing with `ConsumerAgents.dismiss` doing nothing, and with all consumers given the first
# one's agent.
def test_a_consumers_access_ends_with_it_and_others_continue_to_read(ends):
    backend = KeyedNixl()
    producer = ends.far_producer(backend.name, NUM_PAGES, PAGE_BYTES)
    stays, goes = (Memory(NUM_PAGES, PAGE_BYTES) for _ in range(2))
    reported = producer.admit(consumer=2)
    with (
        closing(backend.connect(producer.admit(consumer=1), producer.remote, stays.pool)) as first,
        closing(backend.connect(reported, producer.remote, goes.pool)) as second,
    ):
        undisturbed = Copies(first, stays, producer.content)
        ended = Copies(second, goes, producer.content)
        wait_for(lambda: undisturbed.num_right > 2 and ended.num_right > 2)
        producer.dismiss(consumer=2)
        wait_for(lambda: bool(ended.error))
        assert "TransferError" in ended.error
        before = undisturbed.num_right
        wait_for(lambda: undisturbed.num_right > before + 5)
        undisturbed.stop()
        ended.stop()
        assert not undisturbed.error
    with pytest.raises(TransferError):
        backend.connect(reported, producer.remote, goes.pool).close()


@contextmanager
def serving(*kinds: PathKind) -> Iterator[NixlProducer]:
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    producer = NixlBackend(kinds).serve(memory.pool, 1)
    try:
        yield producer
    finally:
        producer.close()


def held() -> tuple[int, int, int]:
    """Return the descriptors, threads and mappings of this process."""
    files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return files, threads, len(Path("/proc/self/maps").read_text().splitlines())


# Seen failing with `ConsumerAgents.dismiss` doing nothing.
def test_consumers_that_have_gone_leave_no_resources():
    with serving(KEYED_CMA) as producer:

        def come_and_go(consumers: range) -> tuple[int, int, int]:
            """Return the resources held while the last consumer is connected."""
            for consumer in consumers:
                producer.prepare(consumer).result(WAIT_S)
                assert producer.admit(consumer)
                last = held()  # all earlier ones have ended: one thread handles one after the other
                producer.dismiss(consumer)
            return last

        files, threads, mappings = come_and_go(range(5))
        files_after, threads_after, mappings_after = come_and_go(range(5, 55))
        # Resources of earlier tests may be released during this one.
        assert files_after <= files and threads_after <= threads
        assert mappings_after <= mappings + 50  # of about 300 that 50 agents have


class Gate:
    """Delays agents while they are made, and knows those that have not ended."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Semaphore(0)
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.num_made = 0

    @property
    def kind(self) -> PathKind:
        gate = self

        class Evidence(HostEvidence):
            def describe(self, metadata: bytes) -> bytes:
                gate._alive.add(self)
                gate.num_made += 1
                gate._reached.release()
                assert gate._open.wait(WAIT_S)
                return super().describe(metadata)

        return replace(KEYED_CMA, evidence=Evidence)

    @property
    def num_alive(self) -> int:
        return len(self._alive)

    def wait_until_reached(self) -> None:
        assert self._reached.acquire(timeout=WAIT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def make_agents(gate: Gate) -> Iterator[Callable[..., ConsumerAgents]]:
    made: list[ConsumerAgents] = []
    memory = Memory(NUM_PAGES, PAGE_BYTES)

    def make(**arguments: int) -> ConsumerAgents:
        made.append(ConsumerAgents([gate.kind], NixlHostMemory(memory.pool), **arguments))
        return made[-1]

    yield make
    gate.open()
    for agents in made:
        agents.close()


# Seen failing if `ConsumerAgents.dismiss` calls `submit` only under `if made.done()`.
def test_a_consumer_that_leaves_while_its_agent_is_made_leaves_no_agent(gate, make_agents):
    agents = make_agents()
    agents.prepare(1)
    gate.wait_until_reached()
    waits, last = agents.prepare(2), agents.prepare(3)
    agents.dismiss(1)
    agents.dismiss(2)
    assert waits.cancelled() and not agents.offers(1)
    gate.open()
    last.result(WAIT_S)
    assert gate.num_made == 2  # none for the second
    wait_for(lambda: gate.num_alive == 1)  # the third's: the first one's ends after it is made
    assert agents.offers(3)


# Seen failing with the semaphore released in `dismiss`, and if it is never acquired.
def test_there_are_never_more_agents_than_allowed(gate, make_agents, caplog):
    agents = make_agents(max_consumers=2)
    agents.prepare(1)
    gate.wait_until_reached()
    agents.prepare(2)
    agents.dismiss(1)  # which ends once it has been made
    assert agents.prepare(3).done() and not agents.offers(3)
    assert "consumer gets no keys" in caplog.text and "2 have" in caplog.text
    gate.open()
    wait_for(lambda: gate.num_alive == 1 and bool(agents.offers(2)))
    agents.prepare(4).result(WAIT_S)
    assert agents.offers(4) and gate.num_alive == 2


# Seen failing without the loop in `ConsumerAgents.close`.
def test_the_end_of_a_producer_ends_the_agents_of_all_its_consumers(gate, make_agents):
    agents = make_agents()
    gate.open()
    for consumer in range(3):
        agents.prepare(consumer).result(WAIT_S)
    assert gate.num_alive == 3
    agents.close()
    assert gate.num_alive == 0
    agents.close()
    assert "nixl-consumers" not in {thread.name[:12] for thread in threading.enumerate()}


# Seen failing without the `except` in `ConsumerAgents.poll`.
def test_an_agent_that_fails_affects_only_its_consumer(monkeypatch):
    with serving(KEYED) as producer:
        for consumer in (1, 2):
            producer.prepare(consumer).result(WAIT_S)
        broken, poll = [True], NixlAgent.poll

        def poll_first(agent: NixlAgent) -> None:
            if broken:
                broken.pop()
                raise TransferError("nixl: NIXL_ERR_BACKEND")
            poll(agent)

        monkeypatch.setattr(NixlAgent, "poll", poll_first)
        producer.poll()
        with pytest.raises(TransferError, match="no agent has been made"):
            producer.admit(1)
        assert producer.admit(2)


def test_shared_paths_are_offered_before_the_consumers_own_is_ready():
    with serving(PATHS[0], KEYED) as producer:

        def reported() -> list[str]:
            described = msgspec.msgpack.decode(producer.admit(1), type=NixlDescription)
            return [offer.path for offer in described.offers]

        assert reported() == ["cma"]
        producer.prepare(1).result(WAIT_S)
        assert reported() == ["cma", "keyed"]


def test_a_consumer_without_any_path_gets_an_error():
    with (
        serving(KEYED_CMA) as producer,
        pytest.raises(TransferError, match="no agent has been made"),
    ):
        producer.admit(1)


def test_an_agent_that_this_machine_cannot_make_is_detected_at_start():
    def nothing(pool: PagePool, scratch: PagePool) -> Any:
        raise TransferError("no such port")

    with pytest.raises(TransferError, match="no one-sided path: cma: no such port"):
        NixlBackend([replace(KEYED_CMA, evidence=nothing)]).serve(Memory(8, PAGE_BYTES).pool, 1)


def test_only_rdma_hands_out_keys():
    assert {kind.name for kind in PATHS if kind.keyed} == {"rdma"}
