"""The choice of nixl's one-sided path, and the end of its agents. Unproven paths are never used."""

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.errors import EngineFault, TransferError
from kvtransfer.backends import path_proof, rdma_proof
from kvtransfer.backends.base import PageCut, PagePool
from kvtransfer.backends.device_memory import DeviceFailure
from kvtransfer.backends.nixl import backend as nixl
from kvtransfer.backends.nixl.agent import (
    NixlAgent,
    NixlDescription,
    NixlHostMemory,
    descriptors,
    segment,
)
from kvtransfer.backends.nixl.backend import NixlBackend
from kvtransfer.backends.nixl.paths import HOST, PATHS, NixlTransports
from kvtransfer.backends.path_proof import SameHost
from tests.support.network.data_children import (
    CANARY,
    CONSUMER,
    SOCKETS,
    Memory,
    TwoPathNixl,
    scattered,
)
from tests.support.network.data_ends import Ends, FarProducer, closing
from tests.support.network.sockets import sockets_of

pytestmark = pytest.mark.usefixtures("one_sided")

NUM_PAGES, PAGE_BYTES = 512, 16384


@pytest.fixture
def producer(ends: Ends) -> FarProducer:
    return ends.far_producer("nixl", NUM_PAGES, PAGE_BYTES)


def changed(producer: FarProducer, **offer: object) -> bytes:
    """Return the producer's description with parts of its only offer replaced."""
    description = msgspec.msgpack.decode(producer.admit())
    description["offers"][0] |= offer
    return msgspec.msgpack.encode(description)


def connect(producer: FarProducer, description: bytes, backend: NixlBackend) -> None:
    pool = Memory(NUM_PAGES, PAGE_BYTES).pool
    backend.connect(description, producer.remote, pool).close()


# Seen failing without the check of the rate in `_make_contact`, and with the agents given the
# transports of the environment.
def test_a_path_for_which_ucx_uses_sockets_is_rejected(ends):
    producer = ends.far_producer("nixl-two-paths", NUM_PAGES, PAGE_BYTES)
    reason = r"no one-sided path: sockets: reads do not use this path: they reach only \d+\.\d\d"
    with pytest.raises(TransferError, match=reason):
        connect(producer, producer.admit(), NixlBackend((SOCKETS,)))


# As if another process' memory could be mapped and not read. Seen failing with every producer
# polled.
def test_a_path_for_which_ucx_needs_the_producer_is_rejected(producer, monkeypatch):
    monkeypatch.setattr(nixl, "CONNECT_S", 1.0)
    helped = replace(PATHS[0], transports=NixlTransports("posix,cuda_copy", errors="none"))
    with pytest.raises(TransferError, match=r"cma: no read of the producer's memory has completed"):
        connect(producer, producer.admit(), NixlBackend((helped,)))
    producer.has_run()


@pytest.mark.parametrize("namespace", ["ipc", "pid"])
def test_a_producer_in_another_namespace_is_detected_at_once(ends, namespace):
    producer = ends.producer_apart(namespace, NUM_PAGES, PAGE_BYTES)
    with pytest.raises(TransferError, match=rf"cma: the producer is in namespaces .*{namespace}:"):
        connect(producer, producer.admit(), NixlBackend())
    producer.has_run()


# With the proof switched off. Seen failing with sysv instead of posix: agents connect, and UCX
# needs the producer.
def test_agents_of_different_process_namespaces_do_not_connect(ends, monkeypatch):
    monkeypatch.setattr(path_proof, "prove_same_host", lambda place, metadata: None)
    producer = ends.producer_apart("pid", NUM_PAGES, PAGE_BYTES)
    with pytest.raises(TransferError, match=r"cma: the producer's agent is unreachable: nixl"):
        connect(producer, producer.admit(), NixlBackend())
    producer.has_run()


@pytest.mark.parametrize(
    "directory, wanted, reason",
    [
        ("missing", 0, "missing: No such file or directory"),
        ("", 1 << 60, r"has \d+ MiB left, UCX wants"),
    ],
)
def test_missing_shared_memory_for_agents_is_reported(
    monkeypatch, tmp_path, directory, wanted, reason
):
    monkeypatch.setattr(path_proof, "_SHARED_MEMORY", tmp_path / directory)
    monkeypatch.setattr(path_proof, "_FREE_BYTES", wanted)
    with pytest.raises(TransferError, match=f"no one-sided path: cma: .*{reason}"):
        NixlBackend().serve(Memory(8, PAGE_BYTES).pool, 1)


def test_the_next_path_is_used_if_the_first_does_not_work(ends):
    backend = TwoPathNixl()
    producer = ends.far_producer(backend.name, NUM_PAGES, PAGE_BYTES)
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    connection = ends.connect(backend, producer, memory)
    assert connection.path == "cma"
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    connection.copy(source, destination)
    assert (memory.pages[destination] == producer.content[source]).all()


@pytest.mark.parametrize(
    "offer, reason",
    [
        ({"path": "teleport"}, "teleport: unknown path"),
        ({"path": "cuda_ipc"}, "cuda_ipc: unknown path"),  # not to host memory
        ({"path": "rdma"}, "rdma: not a description of rdma"),
        ({"path": "rdma", "evidence": msgspec.msgpack.encode({"ports": ["a/1"]})}, "no RDMA port"),
        ({"evidence": msgspec.msgpack.encode({"ports": ["a/1"]})}, "cma: not a description of cma"),
    ],
)
def test_an_offer_that_is_wrong_here_is_rejected_before_its_agent_is_contacted(
    producer, offer, reason
):
    description = changed(producer, **offer, metadata=b"never looked at")
    with pytest.raises(TransferError, match=reason):
        connect(producer, description, NixlBackend())


def test_memory_of_different_kinds_has_no_one_sided_path(producer):
    description = msgspec.msgpack.decode(producer.admit()) | {"device": "cuda:1"}
    with pytest.raises(TransferError, match="no one-sided path from cuda:1 to cpu"):
        connect(producer, msgspec.msgpack.encode(description), NixlBackend())


def network_card(root: Path, name: str, **states: str) -> None:
    for port, state in states.items():
        (root / name / "ports" / port.removeprefix("port")).mkdir(parents=True)
        (root / name / "ports" / port.removeprefix("port") / "state").write_text(f"{state}\n")


def test_only_active_ports_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(rdma_proof, "DEVICES", tmp_path / "missing")
    with pytest.raises(TransferError, match="no RDMA port"):
        rdma_proof.active_ports()
    network_card(tmp_path, "mlx5_0", port1="4: ACTIVE", port2="1: DOWN")
    network_card(tmp_path, "mlx5_1", port1="2: INIT")
    network_card(tmp_path, "mlx5_2", port1="4: ACTIVE")
    monkeypatch.setattr(rdma_proof, "DEVICES", tmp_path)
    assert rdma_proof.active_ports() == ("mlx5_0/1", "mlx5_2/1")


def test_a_producer_offers_working_paths_and_reports_the_others(tmp_path, monkeypatch, caplog):
    network_card(tmp_path, "mlx5_0", port1="4: ACTIVE")  # without a device
    monkeypatch.setattr(rdma_proof, "DEVICES", tmp_path)
    with caplog.at_level(logging.INFO):
        producer = NixlBackend().serve(Memory(8, PAGE_BYTES).pool, 1)
    described = msgspec.msgpack.decode(producer.admit(CONSUMER), type=NixlDescription)
    producer.close()
    assert [offer.path for offer in described.offers] == ["cma"]
    assert 'nixl offers paths=cma reason="not rdma: nixl' in caplog.text


# Seen failing if the agent uses the transports of the environment.
def test_transports_of_the_environment_are_neither_used_nor_lost(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self,cuda_copy")
    before = set(sockets_of(os.getpid()))
    agent = NixlAgent()
    opened = set(sockets_of(os.getpid())) - before
    agent.destroy()
    assert {socket.kind for socket in opened} <= {"unix"}
    assert os.environ["UCX_TLS"] == "tcp,self,cuda_copy"


def test_agents_over_rdma_use_the_active_or_the_configured_ports(tmp_path, monkeypatch):
    network_card(tmp_path, "mlx5_0", port1="4: ACTIVE", port2="4: ACTIVE")
    network_card(tmp_path, "mlx5_1", port1="1: DOWN")
    monkeypatch.setattr(rdma_proof, "DEVICES", tmp_path)
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    assert rdma_proof.devices() == "mlx5_0:1,mlx5_0:2"
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:2")
    assert rdma_proof.devices() == "mlx5_0:2"


def test_no_path_may_use_sockets():
    names = {name for kind in PATHS for name in kind.transports.names.split(",")}
    assert names.isdisjoint({"tcp", "all", "net", "sockcm"})


def test_memory_of_a_device_is_registered_with_its_number():
    assert segment("cpu") == ("DRAM", 0)
    assert segment("cuda") == ("VRAM", 0)
    assert segment("cuda:3") == ("VRAM", 3)
    pages = descriptors(PagePool(1 << 40, 4096, 3, "cuda:3"), [PageCut(0, 4096), PageCut(64, 32)])
    at = [(1 << 40) + 4096 * page for page in range(3)]
    assert pages.tolist() == [*([a, 4096, 3] for a in at), *([a + 64, 32, 3] for a in at)]
    assert pages.dtype == np.uint64


# Seen failing without either `self._proved.close()` in NixlConnection.
@pytest.mark.parametrize(
    "offer, transports",
    [({}, HOST), ({"metadata": b"unknown"}, HOST), ({}, NixlTransports("nonsense", errors="none"))],
    ids=["connected", "not met", "no agent"],
)
def test_resources_of_a_path_are_released_with_and_without_a_connection(
    producer, offer, transports
):
    let_go: list[str] = []

    class Held(SameHost):
        def __init__(self, reported: bytes, metadata: bytes, pool: PagePool) -> None:
            """Accept any description."""

        def close(self) -> None:
            let_go.append(self.path)

    backend = NixlBackend([replace(PATHS[0], prove=Held, transports=transports)])
    with suppress(TransferError):
        connect(producer, changed(producer, **offer), backend)
    assert let_go == ["cma"]


class Slow(NixlHostMemory):
    """Memory of a device whose copies outlive the agent."""

    def __init__(self, pool: PagePool, log: list[str]) -> None:
        super().__init__(pool)
        self._log = log

    def settle(self) -> None:
        self._log.append("settled")


class Broken(NixlHostMemory):
    def settle(self) -> None:
        raise DeviceFailure("an illegal memory access was encountered")


# Seen failing without either `settle` in `NixlConnection.close`.
def test_close_waits_for_copies_before_and_after_the_end_of_the_agent(producer, monkeypatch):
    log: list[str] = []
    destroy = NixlAgent.destroy

    def logged(agent: NixlAgent) -> None:
        log.append("destroyed")
        destroy(agent)

    monkeypatch.setattr(NixlAgent, "destroy", logged)
    connect(producer, producer.admit(), NixlBackend(memory_of=lambda pool: Slow(pool, log)))
    assert log == ["settled", "destroyed", "settled"]


def test_an_unknown_fence_is_an_error(producer):
    with pytest.raises(
        EngineFault, match=r"over cma may still write to the pool: an illegal memory access"
    ):
        connect(producer, producer.admit(), NixlBackend(memory_of=Broken))


# Over UCX's tcp both failed: no contact was made, and from the 20th second on no read completed.
@pytest.mark.parametrize("seconds", [0.0, pytest.param(23.0, marks=pytest.mark.long)])
def test_a_stopped_producer_is_connected_read_and_disconnected(producer, seconds):
    description = producer.admit()
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    producer.child.freeze()
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    with closing(NixlBackend().connect(description, producer.remote, memory.pool)) as connection:
        late = time.monotonic() + seconds
        connection.copy(source, destination)
        while time.monotonic() < late:
            threading.Event().wait(0.2)
            memory.pages[:] = CANARY
            connection.copy(source, destination)
    assert (memory.pages[destination] == producer.content[source]).all()
    producer.child.thaw()
    producer.has_run()


# Seen failing without `error.__traceback__ = None` and the `del` in `_call`.
def test_an_error_being_raised_does_not_keep_the_agent_alive(producer):
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    connection = NixlBackend().connect(producer.admit(), producer.remote, memory.pool)
    producer.end()
    failed = False
    try:
        connection.copy(*scattered(0, NUM_PAGES, NUM_PAGES))
    except TransferError:
        failed = True
        connection.close()  # raises EngineFault if something still refers to the agent
    assert failed


def test_an_agent_that_does_not_end_is_an_error():
    agent = NixlAgent()
    keeper = agent._agent.agent  # as a forgotten handle would
    with pytest.raises(EngineFault, match="still exists"):
        agent.destroy()
    del keeper


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"nonce": bytes(32)}, "is not the producer"),
        ({"boot_id": "another"}, "on another host"),
        ({"address": 4096}, "Bad address"),
        ({"pid": 2**31 - 1}, "No such process"),
    ],
)
def test_an_unproven_path_is_not_used(producer, change, reason):
    (offer,) = msgspec.msgpack.decode(producer.admit())["offers"]
    evidence = msgspec.msgpack.encode(msgspec.msgpack.decode(offer["evidence"]) | change)
    with pytest.raises(TransferError, match=f"no one-sided path: .*{reason}"):
        connect(producer, changed(producer, evidence=evidence), NixlBackend())


# Seen failing without the check of the digest in `prove_same_host`.
def test_metadata_that_the_producer_does_not_confirm_is_not_used(producer):
    with pytest.raises(TransferError, match="is not that of the producer's agent"):
        connect(producer, changed(producer, metadata=b"unknown"), NixlBackend())


def test_a_missing_nixl_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    with pytest.raises(TransferError, match="nixl"):
        NixlBackend().serve(Memory(8, 4096).pool, 1)
