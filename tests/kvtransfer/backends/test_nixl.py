"""Properties of nixl beyond the conformance tests: the proof of its path, and the end of an
agent."""

import contextlib
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

from common.errors import EngineFault, TransferError
from kvtransfer.backends.base import BackendConnection
from kvtransfer.backends.nixl.agent import NixlAgent
from kvtransfer.backends.nixl.backend import NixlBackend
from tests.support.network.data_children import CANARY, Memory, scattered
from tests.support.network.data_ends import FarProducer, closing, wait_for

pytestmark = pytest.mark.usefixtures("one_sided")

NUM_PAGES, PAGE_BYTES = 512, 16384
WAIT_S = 60.0


# Seen failing if `_read` ignores the stop flag, and if the thread is not joined.
def test_no_byte_is_written_after_close_at_any_moment(ends):
    producer = ends.far_producer("nixl", NUM_PAGES, PAGE_BYTES)
    description = producer.admit()
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    backend = NixlBackend()
    rng = np.random.default_rng(0)
    for _ in range(25):
        memory.pages[:] = CANARY
        connection = backend.connect(description, producer.remote, memory.pool)
        thread = threading.Thread(target=_copy_small_parts, args=(connection,))
        thread.start()
        wait_for(lambda: bool((memory.pages != CANARY).any()))
        threading.Event().wait(rng.uniform(0, 0.01))  # the random moment
        connection.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        memory.pages[:] = CANARY
        with closing(backend.connect(description, producer.remote, Memory(1, PAGE_BYTES).pool)):
            assert (memory.pages == CANARY).all()


def _copy_small_parts(connection: BackendConnection) -> None:
    """Copy until stopped, then close, like a link's thread."""
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    with contextlib.suppress(TransferError):
        while True:
            for start in range(0, NUM_PAGES, 4):
                part = slice(start, start + 4)
                connection.copy(source[part], destination[part])
    connection.close()


# Over UCX's tcp both failed: no contact was made, and from the 20th second on no read completed.
@pytest.mark.parametrize("seconds", [0.0, pytest.param(23.0, marks=pytest.mark.long)])
def test_a_stopped_producer_is_connected_read_and_disconnected(ends, seconds):
    producer = ends.far_producer("nixl", NUM_PAGES, PAGE_BYTES)
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
def test_an_error_being_raised_does_not_keep_the_agent_alive(ends):
    producer = ends.far_producer("nixl", NUM_PAGES, PAGE_BYTES)
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
def test_an_unproven_path_is_not_used(ends, change, reason):
    producer = ends.far_producer("nixl", NUM_PAGES, PAGE_BYTES)
    with pytest.raises(TransferError, match=f"no one-sided path: .*{reason}"):
        NixlBackend().connect(
            _forged(producer, evidence=change), producer.remote, Memory(NUM_PAGES, PAGE_BYTES).pool
        )


# Seen failing without the check of the digest in `prove_same_host`.
def test_metadata_that_the_producer_does_not_confirm_is_not_used(ends):
    producer = ends.far_producer("nixl", NUM_PAGES, PAGE_BYTES)
    with pytest.raises(TransferError, match="is not that of the producer's agent"):
        NixlBackend().connect(
            _forged(producer, metadata=b"nobody"),
            producer.remote,
            Memory(NUM_PAGES, PAGE_BYTES).pool,
        )


def _forged(
    producer: FarProducer, evidence: dict[str, object] | None = None, metadata: bytes | None = None
) -> bytes:
    """Return the producer's description with parts of it replaced."""
    description = msgspec.msgpack.decode(producer.admit())
    (offer,) = description["offers"]
    reported = msgspec.msgpack.decode(offer["evidence"]) | (evidence or {})
    offer["evidence"] = msgspec.msgpack.encode(reported)
    offer["metadata"] = metadata or offer["metadata"]
    return msgspec.msgpack.encode(description)


def test_a_missing_nixl_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    with pytest.raises(TransferError, match="nixl"):
        NixlBackend().serve(Memory(8, 4096).pool, 1)


def test_neither_end_prints_anything(ends):
    producer = ends.far_producer("nixl", NUM_PAGES, PAGE_BYTES)
    consumer = ends.far_consumer("nixl", NUM_PAGES, PAGE_BYTES)
    consumer.read_from(producer)
    producer.end()
    consumer.failed()
    assert ends.log.read_text() == ""
