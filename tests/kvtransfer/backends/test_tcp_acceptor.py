"""Unauthenticated connections cost a producer of tcp next to nothing, and block no other
consumer."""

import itertools
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from common.errors import TransferError
from kvtransfer.backends.tcp.backend import TcpBackend
from kvtransfer.backends.tcp.producer import TcpAcceptor, TcpProducer
from kvtransfer.backends.tcp.wire import INTRODUCTION, TcpDescription
from tests.support.network.data_children import CONSUMER, Memory
from tests.support.network.data_ends import wait_for

PAGE_BYTES = 4096
ALL = np.arange(8, dtype=np.int32)
CROWD = 300  # more than a producer accepts
CLOSED_S = 60.0  # a producer's two seconds, on a busy machine


@pytest.fixture
def producer() -> Iterator[TcpProducer]:
    """Return a producer in this process, whose threads can be counted."""
    producer = TcpBackend("127.0.0.1").serve(Memory(8, PAGE_BYTES).pool, 1)
    yield producer
    producer.close()


def description_of(producer: TcpProducer) -> TcpDescription:
    return msgspec.msgpack.decode(producer.admit(CONSUMER), type=TcpDescription)


def unauthenticated(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Return an unauthenticated connection that sends nothing."""
    return socket.create_connection(("127.0.0.1", port), CLOSED_S, (host, 0))


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


# Seen failing if each accepted connection starts a thread.
def test_silent_unauthenticated_connections_cost_no_threads_and_are_closed(producer):
    port, before = description_of(producer).port, threading.active_count()
    with ExitStack() as exits:
        silent = [exits.enter_context(unauthenticated(port)) for _ in range(50)]
        assert threading.active_count() <= before
        for connection in silent:
            connection.settimeout(CLOSED_S)
            assert connection.recv(1) == b""


# Seen failing if the acceptor's thread closes the listener (about 1 of 50 times).
def test_an_acceptor_may_be_closed_just_when_it_closes_connections():
    for _ in range(300):
        door = TcpAcceptor("127.0.0.1", 0, lambda *who: None, patience_s=0.003)
        with unauthenticated(door.port), unauthenticated(door.port), unauthenticated(door.port):
            time.sleep(0.003)  # about then
            door.shut()


class Patient:
    """An acceptor without time limits, and the connections that it has accepted."""

    def __init__(self) -> None:
        self.let_in: queue.Queue[tuple[socket.socket, str, bytes]] = queue.Queue()
        self.door = TcpAcceptor(
            "127.0.0.1", 0, lambda *who: self.let_in.put(who), patience_s=3600.0
        )


@pytest.fixture
def patient() -> Iterator[Patient]:
    patient = Patient()
    yield patient
    patient.door.shut()


# Seen failing if `TcpAcceptor._accept` closes no connection.
def test_of_too_many_unauthenticated_connections_the_oldest_is_closed(patient):
    with ExitStack() as exits:
        silent = [exits.enter_context(unauthenticated(patient.door.port)) for _ in range(CROWD)]
        wait_for(lambda: not is_open(silent[0]))
        assert is_open(silent[-1])


# Seen failing if the oldest is closed whichever host it is from.
def test_many_connections_of_one_host_displace_only_its_own(patient):
    port, words = patient.door.port, bytes(range(INTRODUCTION.size))
    with ExitStack() as exits:
        slow = exits.enter_context(unauthenticated(port))
        slow.sendall(words[:7])
        crowd = [exits.enter_context(unauthenticated(port, "127.0.0.2")) for _ in range(CROWD)]
        wait_for(lambda: not is_open(crowd[0]))
        slow.sendall(words[7:])
        connection, host, said = patient.let_in.get(timeout=CLOSED_S)
        exits.callback(connection.close)
        assert (host, said) == ("127.0.0.1", words)


def _pester(port: int, words: bytes, stop: threading.Event) -> None:
    """Open connections that stay, as fast as one thread can."""
    kept: list[socket.socket] = []
    while not stop.is_set():
        try:
            kept.append(socket.create_connection(("127.0.0.1", port), CLOSED_S))
            kept[-1].sendall(words)
        except OSError:
            pass  # closed already
        if len(kept) > CROWD:
            kept.pop(0).close()
    for connection in kept:
        connection.close()


# Seen failing with an earlier limit that included unauthenticated connections (2 of 20 were
# accepted).
@pytest.mark.parametrize(
    "words", [pytest.param(b"", id="silent"), pytest.param(b"\xff" * 4096, id="garbage")]
)
def test_a_connection_flood_blocks_no_consumer_and_fills_no_log(ends, words):
    producer = ends.far_producer("tcp", 8, PAGE_BYTES)
    producer.publish_all()
    description = producer.admit()
    port = msgspec.msgpack.decode(description, type=TcpDescription).port
    backend, memory = TcpBackend("127.0.0.1"), Memory(8, PAGE_BYTES)
    stop = threading.Event()
    flood = threading.Thread(target=_pester, args=(port, words, stop))
    with ExitStack() as exits:
        silent = [exits.enter_context(unauthenticated(port)) for _ in range(CROWD)]
        exits.callback(flood.join)
        exits.callback(stop.set)
        flood.start()
        for _ in range(20):
            connection = backend.connect(description, producer.remote, memory.pool)
            connection.copy(ALL, ALL)
            connection.close()
        assert silent
    lines = ends.log.read_text().splitlines()
    assert 0 < len(lines) <= 10 * 10  # ten of a kind in ten seconds, on a slow machine


def test_a_consumer_that_reconnects_often_is_always_accepted(producer):
    backend, landing = TcpBackend("127.0.0.1"), Memory(8, PAGE_BYTES)
    producer.publications.publish(CONSUMER, ALL)
    with ExitStack() as exits:
        for _ in range(30):  # and leaves the old ones open
            connection = backend.connect(producer.admit(CONSUMER), landing.remote, landing.pool)
            exits.callback(connection.close)
            connection.copy(ALL, ALL)


# Seen failing without the limit in `TcpConsumers.proved`.
def test_connections_of_all_consumers_are_limited_and_existing_ones_continue(producer):
    backend, landing = TcpBackend("127.0.0.1"), Memory(8, PAGE_BYTES)
    with ExitStack() as exits:
        for consumer in itertools.count():
            producer.publications.publish(consumer, ALL)
            try:
                connection = backend.connect(producer.admit(consumer), landing.remote, landing.pool)
            except TransferError:
                break
            exits.callback(connection.close)
            if not consumer:
                first = connection
            assert consumer < 257
        assert consumer == 256
        first.copy(ALL, ALL)
