"""The metrics port, with scrapers and malicious clients."""

import contextlib
import errno
import itertools
import socket
import socketserver
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from common.errors import ConfigError
from common.metrics.serving import MAX_CONNECTIONS, served

WAIT_S = 60.0


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("hits", "Of the test.", registry=registry).inc(3)
    return registry


@pytest.fixture
def port(registry: CollectorRegistry) -> Iterator[int | None]:
    with served(registry, "127.0.0.1", 0, request_s=2.0) as port:
        yield port


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def test_a_scraper_gets_the_registry(port):
    assert "hits_total 3.0" in scrape(port)


# Seen failing if _Server.process_request ends no connection, and if the ended one still counts
# until its thread has ended (the next one in a burst ended it again): "timed out".
def test_the_oldest_of_too_many_silent_connections_are_closed(registry):
    with served(registry, "127.0.0.1", 0, request_s=600.0) as port, contextlib.ExitStack() as exits:
        assert port is not None
        before = threading.active_count()
        silent = [
            exits.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            for _ in range(200)
        ]
        assert "hits_total 3.0" in scrape(port)
        for each in silent[:-MAX_CONNECTIONS]:
            assert each.recv(1) == b""
        deadline = time.monotonic() + WAIT_S
        while threading.active_count() - before > MAX_CONNECTIONS:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# Seen failing if _Server.service_actions ends no connection: "timed out".
def test_a_silent_connection_is_closed_soon(port):
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as silent:
        assert silent.recv(1) == b""


def test_a_request_that_arrives_byte_by_byte_is_ended_too(port):
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as slow:
        deadline = time.monotonic() + WAIT_S
        ended = False
        while not ended and time.monotonic() < deadline:
            try:
                slow.sendall(b"G")
            except OSError:
                ended = True
            time.sleep(0.05)
    assert ended


def test_an_invalid_http_request_gets_no_response(port, capfd):
    for data in (b"\x16\x03\x01\xff", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\n" * 70_000):
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger:
            with contextlib.suppress(OSError):  # it may have ended the connection already
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
    assert capfd.readouterr().err == ""


def test_connections_without_a_thread_are_closed_and_forgotten(port, capfd, monkeypatch):
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        for _ in range(2 * MAX_CONNECTIONS):
            with socket.create_connection(("127.0.0.1", port), WAIT_S) as refused:
                assert refused.recv(1) == b""
    assert "hits_total 3.0" in scrape(port)
    assert capfd.readouterr().err == ""


# Seen failing without the pause: the accepting thread uses a whole core.
def test_without_descriptors_the_server_accepts_at_intervals(port, monkeypatch):
    asked: list[float] = []
    often = threading.Event()

    def accept(_: socketserver.TCPServer) -> None:
        asked.append(time.monotonic())
        if len(asked) == 5:
            often.set()
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as full:
        full.setattr(socketserver.TCPServer, "get_request", accept)
        with socket.create_connection(("127.0.0.1", port), WAIT_S):
            assert often.wait(WAIT_S)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert min(pauses) >= 0.04
    assert "hits_total 3.0" in scrape(port)


def test_a_port_in_use_is_reported_in_one_sentence(registry, port):
    with pytest.raises(ConfigError, match="cannot serve metrics"):
        with served(registry, "127.0.0.1", port):
            pass
