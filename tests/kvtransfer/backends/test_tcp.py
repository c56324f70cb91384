"""Properties of tcp beyond the conformance tests: read permissions, malicious peers, and the
fence."""

import contextlib
import queue
import socket
import struct
import threading

import msgspec
import numpy as np
import pytest

from common.errors import TransferError
from kvtransfer.backends.base import BackendConnection, ReadRefused, TransferBackend
from kvtransfer.backends.tcp.backend import TcpBackend
from kvtransfer.backends.tcp.wire import (
    INTRODUCTION,
    KEY_BYTES,
    REPLY,
    REQUEST,
    FrameStatus,
    TcpDescription,
)
from kvtransfer.messages import HandoffId
from kvtransfer.ports import PagesToRead
from kvtransfer.transfer.link import (
    Link,
    LinkBytes,
    LinkClosed,
    LinkEvent,
    LinkLimits,
    LinkUp,
)
from tests.support.network.data_children import CANARY, CONSUMER, Memory, make_backend, scattered
from tests.support.network.data_ends import changed, introduced, introduction, long_copy, wait_for
from tests.support.network.loopback import LoopbackBackend
from tests.support.processes.cluster import free_ports

MOST = 80  # connections of one consumer
NUM_PAGES, PAGE_BYTES = 2048, 4112  # several requests for all of them
ALL = np.arange(NUM_PAGES, dtype=np.int32)


@pytest.fixture(params=["tcp", "tcp-tls", "tcp-staged", "loopback"])
def backend(request: pytest.FixtureRequest) -> TransferBackend:
    """Return a backend whose producer records its publications."""
    return LoopbackBackend() if request.param == "loopback" else make_backend(request.param)


# Seen failing without the check of publications in `TcpProducer._answer`.
def test_only_pages_published_to_the_consumer_are_served(ends, backend):
    producer = ends.producer(backend, NUM_PAGES, PAGE_BYTES)
    producer.publish(CONSUMER, ALL[:1024])
    producer.publish(CONSUMER + 1, ALL[1024:])
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    connection = ends.connect(backend, producer, memory)
    with pytest.raises(ReadRefused, match="1024"):
        connection.copy(ALL[1020:1028], ALL[1020:1028])
    memory.pages[:] = CANARY
    connection.copy(ALL[:1024], ALL[:1024])
    assert (memory.pages[:1024] == producer.content[:1024]).all()
    assert (memory.pages[1024:] == CANARY).all()


def test_a_page_published_twice_is_readable_until_withdrawn_twice(ends, backend):
    producer = ends.producer(backend, NUM_PAGES, PAGE_BYTES)
    producer.publish(CONSUMER, ALL[:8])
    producer.publish(CONSUMER, ALL[4:12])
    connection = ends.connect(backend, producer, Memory(NUM_PAGES, PAGE_BYTES))
    producer.withdraw(CONSUMER, ALL[:8])
    connection.copy(ALL[4:12], ALL[4:12])
    with pytest.raises(ReadRefused, match="page 3 "):
        connection.copy(ALL[3:12], ALL[3:12])
    producer.withdraw(CONSUMER, ALL[4:12])
    with pytest.raises(ReadRefused):
        connection.copy(ALL[4:5], ALL[4:5])


# Seen failing if `TcpConnection._exchange` leaves the answers after a rejection unread.
@pytest.mark.parametrize("refused", [0, 300, 1100, 2047])
def test_the_copy_after_a_rejected_one_gets_its_own_bytes(ends, backend, refused):
    producer = ends.producer(backend, NUM_PAGES, PAGE_BYTES)
    producer.publish(CONSUMER, np.delete(ALL, refused))
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    connection = ends.connect(backend, producer, memory)
    for _ in range(3):
        with pytest.raises(ReadRefused, match=f"page {refused} "):
            connection.copy(ALL, ALL)
        memory.pages[:] = CANARY
        source, destination = scattered(refused, NUM_PAGES, 1500)
        served = source != refused
        connection.copy(source[served], destination[served])
        assert (memory.pages[destination[served]] == producer.content[source[served]]).all()
        assert (np.delete(memory.pages, destination[served], axis=0) == CANARY).all()


def test_a_key_authenticates_one_consumer_to_one_producer_only(ends):
    backend = TcpBackend("127.0.0.1")
    producer, other = (ends.far_producer("tcp", 8, PAGE_BYTES) for _ in range(2))
    memory = Memory(8, PAGE_BYTES)
    producer.admit(CONSUMER + 1)
    here, there = (
        msgspec.msgpack.decode(o.admit(), type=TcpDescription) for o in (producer, other)
    )
    for lie in ({"consumer": CONSUMER + 1}, {"consumer": CONSUMER + 2}, {"port": there.port}):
        with pytest.raises(TransferError):
            backend.connect(changed(here, **lie), producer.remote, memory.pool)


# Seen failing if `TcpConsumers.dismiss` and `LoopbackBackend.dismiss` do nothing. The last part
# failed when `PublishedPages.forget` did nothing.
def test_a_consumers_access_ends_with_it(ends, backend):
    producer = ends.producer(backend, NUM_PAGES, PAGE_BYTES)
    memory, bystanders = Memory(NUM_PAGES, PAGE_BYTES), Memory(NUM_PAGES, PAGE_BYTES)
    for consumer in (CONSUMER, CONSUMER + 1):
        producer.publish_all(consumer)
    description = producer.admit(CONSUMER)
    connection = ends.connect(backend, producer, memory)
    bystander = ends.connect(backend, producer, bystanders, CONSUMER + 1)
    connection.copy(ALL[:8], ALL[:8])
    producer.dismiss(CONSUMER)
    producer.dismiss(CONSUMER)
    memory.pages[:] = CANARY
    with pytest.raises(TransferError) as ended:
        connection.copy(ALL, ALL)
    assert not isinstance(ended.value, ReadRefused)
    with pytest.raises(TransferError):
        backend.connect(description, producer.remote, memory.pool)
    assert (memory.pages == CANARY).all()
    bystander.copy(ALL, ALL)
    assert (bystanders.pages == producer.content).all()
    # earlier publications are not readable if the number is used again
    with pytest.raises(ReadRefused):
        ends.connect(backend, producer, memory).copy(ALL[:1], ALL[:1])


def test_a_running_copy_ends_with_its_consumer(ends, backend):
    producer = ends.producer(backend, NUM_PAGES, PAGE_BYTES)
    producer.publish_all()
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    connection = ends.connect(backend, producer, memory)
    with long_copy(connection, memory, NUM_PAGES):  # 30 GiB
        producer.dismiss(CONSUMER)


# Seen failing without the check of the count in `TcpConsumers.proved`.
def test_an_overheard_proof_opens_no_second_connection(ends):
    producer = ends.far_producer("tcp", 8, PAGE_BYTES)
    reported = msgspec.msgpack.decode(producer.admit(), type=TcpDescription)
    overheard = introduction(reported)
    for answer_bytes in (KEY_BYTES, 0):
        with socket.create_connection((reported.host, reported.port), 20) as raw:
            raw.sendall(overheard)
            assert len(raw.recv(KEY_BYTES, socket.MSG_WAITALL)) == answer_bytes


# Seen failing with a count that had to exceed all earlier ones: ranks that connected at the same
# time were rejected.
def test_ranks_of_a_consumer_connect_in_any_order(ends):
    producer = ends.far_producer("tcp", 8, PAGE_BYTES)
    reported = msgspec.msgpack.decode(producer.admit(), type=TcpDescription)
    first, second = introduction(reported), introduction(reported)
    for sent, answer_bytes in ((second, KEY_BYTES), (first, KEY_BYTES), (second, 0), (first, 0)):
        with socket.create_connection((reported.host, reported.port), 20) as raw:
            raw.sendall(sent)
            assert len(raw.recv(KEY_BYTES, socket.MSG_WAITALL)) == answer_bytes


# Seen failing without the check of the producer's proof in `_connect`.
def test_a_consumer_does_not_trust_an_unknown_listener():
    """The listener accepts everything."""
    memory = Memory(8, PAGE_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def agree() -> None:
            peer, _ = impostor.accept()
            with peer:
                peer.recv(INTRODUCTION.size, socket.MSG_WAITALL)
                peer.sendall(bytes(KEY_BYTES))
                peer.recv(1)

        thread = threading.Thread(target=agree)
        thread.start()
        description = TcpDescription(
            host="127.0.0.1",
            port=impostor.getsockname()[1],
            consumer=CONSUMER,
            key=bytes(KEY_BYTES),
            certificate=b"",
            scratch_pages=1,
        )
        with pytest.raises(TransferError, match="a process other than"):
            TcpBackend("127.0.0.1").connect(
                msgspec.msgpack.encode(description), memory.remote, memory.pool
            )
        thread.join()


# Seen failing, with a UnicodeError on the link's thread, if TcpConnection catches only OSError.
@pytest.mark.parametrize("host", ["a..b", "x" * 64, "a\0b", "", "nowhere.invalid"])
def test_an_unknown_host_is_no_path(host):
    memory = Memory(8, PAGE_BYTES)
    description = TcpDescription(host, 1, CONSUMER, bytes(KEY_BYTES), b"", 1)
    with pytest.raises(TransferError, match="tcp to"):
        TcpBackend("127.0.0.1").connect(
            msgspec.msgpack.encode(description), memory.remote, memory.pool
        )


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(REQUEST.pack(0, 0, 0, PAGE_BYTES), id="no pages"),
        pytest.param(REQUEST.pack(0, 2**32 - 1, 0, PAGE_BYTES), id="endless pages"),
        pytest.param(
            REQUEST.pack(0, 1023, 0, PAGE_BYTES),
            id="no more pages than vectors, but too many bytes",
        ),
        pytest.param(REQUEST.pack(9, 1, 0, PAGE_BYTES) + bytes(4), id="unknown kind"),
        pytest.param(REQUEST.pack(0, 1, 0, 0) + bytes(4), id="no bytes"),
        pytest.param(REQUEST.pack(0, 1, 0, PAGE_BYTES + 1) + bytes(4), id="more than a page"),
        pytest.param(REQUEST.pack(0, 1, 1, PAGE_BYTES) + bytes(4), id="beyond a page"),
        pytest.param(REQUEST.pack(0, 1, 2**64 - 16, 32) + bytes(4), id="overflow"),
        pytest.param(REQUEST.pack(0, 1024, 0, 1), id="more pages than vectors"),
        pytest.param(b"\xff" * 4096, id="noise"),
    ],
)
def test_a_consumer_with_invalid_frames_loses_only_its_own_connection(ends, frame):
    producer = ends.far_producer("tcp", NUM_PAGES, PAGE_BYTES)
    producer.publish_all()
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    connection = ends.connect(TcpBackend("127.0.0.1"), producer, memory)
    with introduced(producer.admit()) as raw:
        raw.sendall(frame)
        with contextlib.suppress(ConnectionResetError):  # it had not read the whole frame
            assert raw.recv(1) == b""
    connection.copy(ALL, ALL)
    assert (memory.pages == producer.content).all()


def test_an_unpublished_or_unknown_page_is_rejected_at_once_with_its_number(ends):
    producer = ends.far_producer("tcp", NUM_PAGES, PAGE_BYTES)
    producer.publish(CONSUMER, ALL[:4])
    with introduced(producer.admit()) as raw:
        for pages, refused in (((0, 5, 1), 5), ((-1,), -1), ((0, 2**31 - 1), 2**31 - 1)):
            raw.sendall(
                REQUEST.pack(0, len(pages), 0, PAGE_BYTES) + struct.pack(f"<{len(pages)}i", *pages)
            )
            answer = REPLY.unpack(raw.recv(REPLY.size, socket.MSG_WAITALL))
            assert answer == (FrameStatus.REFUSED, refused)
            padding = raw.recv(len(pages) * PAGE_BYTES, socket.MSG_WAITALL)
            assert padding == bytes(len(pages) * PAGE_BYTES)
        raw.sendall(REQUEST.pack(0, 1, 0, PAGE_BYTES) + bytes(4))
        assert REPLY.unpack(raw.recv(REPLY.size, socket.MSG_WAITALL)) == (FrameStatus.DATA, 0)
        assert raw.recv(PAGE_BYTES, socket.MSG_WAITALL) == producer.content[0].tobytes()


def test_the_oldest_connection_of_a_consumer_with_too_many_is_closed(ends):
    producer = ends.far_producer("tcp", 8, PAGE_BYTES)
    producer.publish_all()
    producer.publish_all(CONSUMER + 1)
    backend, memory = TcpBackend("127.0.0.1"), Memory(8, PAGE_BYTES)
    other = ends.connect(backend, producer, memory, CONSUMER + 1)
    connections = [ends.connect(backend, producer, memory) for _ in range(MOST + 1)]
    wait_for(lambda: not _copies(connections[0]))
    for connection in (other, *connections[1:]):
        connection.copy(ALL[:8], ALL[:8])


def _copies(connection: BackendConnection) -> bool:
    try:
        connection.copy(ALL[:8], ALL[:8])
    except TransferError:
        return False
    return True


def test_unauthenticated_and_idle_connections_delay_no_consumer(ends):
    producer = ends.far_producer("tcp", NUM_PAGES, PAGE_BYTES)
    producer.publish_all()
    port = msgspec.msgpack.decode(producer.admit(), type=TcpDescription).port
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    with (
        socket.create_connection(("127.0.0.1", port)),
        socket.create_connection(("127.0.0.1", port)) as liar,
        introduced(producer.admit()) as sleeper,
    ):
        liar.sendall(bytes(INTRODUCTION.size))
        for _ in range(64):  # far more than the buffers of both sockets hold, and it never reads
            sleeper.sendall(REQUEST.pack(0, 512, 0, PAGE_BYTES) + ALL[:512].tobytes())
        connection = ends.connect(TcpBackend("127.0.0.1"), producer, memory)
        connection.copy(ALL, ALL)
    assert (memory.pages == producer.content).all()


# Seen failing without the shutdown in `TcpConnection.stop` (the link never closes), and if
# `Link.close` sends LinkClosed instead of the link's thread (pages change after it).
@pytest.mark.parametrize("name", ["tcp", "tcp-tls"])
def test_a_producer_that_resumes_after_the_link_has_closed_writes_nothing(ends, name):
    num_pages, page_bytes = 2, 32 << 20  # the sockets hold less than a page, so the consumer blocks
    producer = ends.far_producer(name, num_pages, page_bytes)
    producer.publish_all()
    backend, memory = make_backend(name), Memory(num_pages, page_bytes)
    description = producer.admit()
    events: queue.Queue[LinkEvent] = queue.Queue()
    link = Link(
        1,
        lambda: backend.connect(description, producer.remote, memory.pool),
        events.put,
        num_bytes=LinkBytes(page_bytes),
        limits=LinkLimits(60.0),
    )
    assert isinstance(events.get(timeout=60), LinkUp)
    source, destination = scattered(0, num_pages, num_pages)
    for number in range(100):
        link.post(HandoffId(CONSUMER, number, 1), PagesToRead(source, destination, ()))
    wait_for(lambda: bool((memory.pages[:, 0] != CANARY).any()))
    producer.child.freeze()
    link.close("its producer is silent")
    closed = events.get(timeout=60)
    while not isinstance(closed, LinkClosed):
        closed = events.get(timeout=60)
    assert closed.unfinished, "all was read before the producer could be frozen"
    memory.pages[:] = CANARY
    producer.child.thaw()
    producer.has_run()
    assert link.join(60)
    assert (memory.pages == CANARY).all()


@pytest.mark.parametrize("name", ["tcp", "tcp-tls"])
def test_a_closed_producer_serves_no_consumer_and_frees_its_port(name):
    backend, memory, target = make_backend(name), Memory(8, 4096), Memory(8, 4096)
    producer = backend.serve(memory.pool, 1)
    description = producer.admit(CONSUMER)
    producer.publications.publish(CONSUMER, ALL[:8])
    connection = backend.connect(description, memory.remote, target.pool)
    connection.copy(ALL[:8], ALL[:8])
    producer.close()
    producer.close()
    with pytest.raises(TransferError):
        connection.copy(ALL[:8], ALL[:8])
    connection.close()
    with pytest.raises(TransferError, match="refused"):
        backend.connect(description, memory.remote, target.pool)


def test_an_address_of_another_host_cannot_be_served():
    with pytest.raises(TransferError, match=r"192\.0\.2\.1"):
        TcpBackend("192.0.2.1").serve(Memory(8, 4096).pool, 1)


def test_a_producer_uses_the_configured_port_and_reports_a_conflict():
    (port,) = free_ports(1)
    backend, memory, target = (
        TcpBackend("127.0.0.1", data_port=port),
        Memory(8, 4096, fill=7),
        Memory(8, 4096),
    )
    producer = backend.serve(memory.pool, 1)
    with pytest.raises(TransferError, match=rf"127\.0\.0\.1, port {port}: .*in use"):
        backend.serve(Memory(8, 4096).pool, 2)
    producer.publications.publish(CONSUMER, ALL[:8])
    description = producer.admit(CONSUMER)
    assert msgspec.msgpack.decode(description, type=TcpDescription).port == port
    connection = backend.connect(description, memory.remote, target.pool)
    connection.copy(ALL[:8], ALL[:8])
    producer.close()
    connection.close()
    assert (target.pages == 7).all()
    backend.serve(memory.pool, 3).close()  # at once, like an engine that restarts


def test_pages_are_read_over_ipv6_as_well():
    backend, memory, target = TcpBackend("::1"), Memory(8, 4096, fill=7), Memory(8, 4096)
    producer = backend.serve(memory.pool, 1)
    producer.publications.publish(CONSUMER, ALL[:8])
    connection = backend.connect(producer.admit(CONSUMER), memory.remote, target.pool)
    connection.copy(ALL[:8], ALL[:8])
    connection.close()
    producer.close()
    assert (target.pages == 7).all()
