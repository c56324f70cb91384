"""Rates of page reads between two processes, compared with the bare rate of each path.

For every number of pages, the same scattered pages are read in turn by memcpy, a bare socket, the
tcp backend without and with TLS, one bare NIXL READ, and the nixl backend. The readers alternate
round after round, so that changes of the machine's speed affect all of them. A ratio is the median
over rounds of (Baton / bare).
"""

import os
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.backends.base import Ints, PagePool, PoolRegion
from kvtransfer.backends.nixl.agent import load
from kvtransfer.backends.nixl.paths import HOST
from tests.support.network.data_children import Child, Memory, content, make_backend, scattered
from tools.bench.support.record import say, table
from tools.bench.support.systems import cpu_seconds_of

COUNTS = (1, 4, 16, 64, 256, 1024, 4096)
NUM_PAGES = max(COUNTS)  # of each pool
PAGE_BYTES = 64 << 10
BACKENDS = {"tcp": "tcp", "tls": "tcp-tls", "nixl": "nixl"}  # of make_backend
BARE = {"tcp": "bare socket", "nixl": "bare nixl"}  # the peer of each path
GOAL = 0.95
COLUMNS = {
    "pages": "{pages}",
    "GiB/s memcpy": "{gib_per_s[memcpy]:.2f}",
    "bare nixl": "{gib_per_s[bare nixl]:.2f}",
    "nixl": "{gib_per_s[nixl]:.2f}",
    "of bare": "{nixl_of_bare:.0%}",
    "bare socket": "{gib_per_s[bare socket]:.2f}",
    "tcp": "{gib_per_s[tcp]:.2f}",
    "of bare ": "{tcp_of_bare:.0%}",
    "tls": "{gib_per_s[tls]:.2f}",
    "CPU s per GiB, tcp": "{cpu_s_per_gib[tcp]:.2f}",
    "tls ": "{cpu_s_per_gib[tls]:.2f}",
    "descriptors": "{nixl_descriptors}",
    "post us": "{nixl_post_us:.1f}",
}

_GIB = 1 << 30
_CONSUMER, _SEED = 1, 7
_ASK = struct.Struct("<Q")  # request of the bare socket: number of bytes
Reads = Mapping[str, Callable[[Ints, Ints], None]]  # source and destination pages, by reader


def measure(rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return one row per number of pages, and the goals.

    Raises TransferError if a path is missing.
    """
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as exits:
        logs = exits.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-"))
        child = Child(_produce, cores[-1], log=Path(logs) / "producer")
        exits.callback(child.kill)
        producer: _Producer = child.receive()
        exits.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, cores[:1])
        target = Memory(NUM_PAGES, PAGE_BYTES)
        bare_socket = exits.enter_context(_connect(producer.port))
        bare_nixl = _BareNixl(producer, target)
        own = {}
        for name, backend in BACKENDS.items():
            description = producer.descriptions[name]
            own[name] = make_backend(backend).connect(description, producer.remote, target.pool)
            exits.callback(own[name].close)
        reads: Reads = {
            "memcpy": _memcpy(target),
            "bare socket": _socket_read(bare_socket, target),
            "tcp": own["tcp"].copy,
            "tls": own["tls"].copy,
            "bare nixl": bare_nixl.read,
            "nixl": own["nixl"].copy,
        }
        _prove(reads, target)
        rows = [_row(count, reads, bare_nixl, child.pid, rounds) for count in COUNTS]
    table(rows, COLUMNS)
    of_bare = {path: {row["pages"]: row[f"{path}_of_bare"] for row in rows} for path in BARE}
    met = {path: min(of_bare[path].values()) >= GOAL for path in BARE}
    say(f"at least {GOAL:.0%} of the bare rate for every number: {met}")
    return rows, {"goal_of_bare": GOAL, "of_bare": of_bare, "met_everywhere": met}


def _row(
    count: int, reads: Reads, bare_nixl: "_BareNixl", producer_pid: int, rounds: int
) -> dict[str, Any]:
    """Measure reads of `count` pages. The readers take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in reads}
    cpu_seconds = dict.fromkeys(reads, 0.0)
    posts: list[float] = []
    # A sample with few pages consists of many reads of different pages, to last long enough for the
    # clock.
    repeats = max(1, min(200, NUM_PAGES // (4 * count)))
    for number in range(rounds + 1):
        pages = [
            scattered(number * repeats + repeat, NUM_PAGES, count) for repeat in range(repeats)
        ]
        for name, read in reads.items():
            cpu_before = cpu_seconds_of(producer_pid) + time.process_time()
            started = time.perf_counter()
            for source, destination in pages:
                read(source, destination)
            took_s = time.perf_counter() - started
            cpu_seconds[name] += cpu_seconds_of(producer_pid) + time.process_time() - cpu_before
            if number:  # the first one is the warm-up
                seconds[name].append(took_s / repeats)
        posts += [bare_nixl.post_seconds(*pair) for pair in pages]
    num_bytes = count * PAGE_BYTES
    median = {name: statistics.median(values) for name, values in seconds.items()}
    read_gib = num_bytes * repeats * (rounds + 1) / _GIB
    row: dict[str, Any] = {
        "pages": count,
        "bytes": num_bytes,
        "gib_per_s": {name: round(num_bytes / _GIB / s, 3) for name, s in median.items()},
        # Both ends. The producer's in steps of 10 ms.
        "cpu_s_per_gib": {name: round(s / read_gib, 3) for name, s in cpu_seconds.items()},
        "us": {name: round(s * 1e6, 1) for name, s in median.items()},
        "nixl_descriptors": count,
        "nixl_post_us": round(statistics.median(posts) * 1e6, 1),
    }
    for ours, bare in BARE.items():
        ratios = (b / o for b, o in zip(seconds[bare], seconds[ours], strict=True))
        row[f"{ours}_of_bare"] = round(statistics.median(ratios), 3)
    return row


def _prove(reads: Reads, target: Memory) -> None:
    """Check the bytes before rates are reported."""
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    expected = content(_SEED, NUM_PAGES, PAGE_BYTES)
    for name in ("tcp", "tls", "bare nixl", "nixl"):
        target.pages[:] = 0
        reads[name](source, destination)
        if not (target.pages[destination] == expected[source]).all():
            raise AssertionError(f"{name} brought wrong bytes")


def _memcpy(target: Memory) -> Callable[[Ints, Ints], None]:
    source = np.ones_like(target.pages)

    def read(source_pages: Ints, destination_pages: Ints) -> None:
        np.copyto(target.pages[: len(source_pages)], source[: len(source_pages)])

    return read


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 5)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _socket_read(connection: socket.socket, target: Memory) -> Callable[[Ints, Ints], None]:
    flat = memoryview(target.pages.reshape(-1))  # type: ignore[arg-type]

    def read(source_pages: Ints, destination_pages: Ints) -> None:
        wanted = len(source_pages) * PAGE_BYTES
        connection.sendall(_ASK.pack(wanted))
        got = 0
        while got < wanted:
            got += connection.recv_into(flat[got:wanted], 0, socket.MSG_WAITALL)

    return read


class _BareNixl:
    """NIXL with only a single READ of all pages."""

    def __init__(self, producer: "_Producer", target: Memory) -> None:
        self._agent = _bare_agent("bench-consumer", target.pool)
        name = self._agent.add_remote_agent(producer.bare_metadata)
        self._local, self._remote = (
            self._agent.prep_xfer_dlist(owner, _descriptors(pool), "DRAM")
            for owner, pool in (("NIXL_INIT_AGENT", target.remote), (name, producer.remote))
        )
        first = np.zeros(1, np.int32)
        self.read(first, first)  # establishes the connection

    def read(self, source_pages: Ints, destination_pages: Ints) -> None:
        handle = self._made(source_pages, destination_pages)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        handle.release()
        assert state == "DONE"

    def post_seconds(self, source_pages: Ints, destination_pages: Ints) -> float:
        """Return the seconds to make one request of these descriptors."""
        started = time.perf_counter()
        handle = self._made(source_pages, destination_pages)
        seconds = time.perf_counter() - started
        handle.release()
        return seconds

    def _made(self, source_pages: Ints, destination_pages: Ints) -> Any:
        return self._agent.make_prepped_xfer(
            "READ", self._local, destination_pages, self._remote, source_pages
        )


def _bare_agent(name: str, pool: PagePool) -> Any:
    """Return an agent with the transports of host memory, the defaults of `load`."""
    api = load()
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": HOST.errors})
    region = np.array([[pool.base, pool.num_pages * pool.page_bytes, 0]], np.uint64)
    agent.register_memory(region, "DRAM")
    return agent


def _descriptors(remote: PoolRegion) -> NDArray[np.uint64]:
    descriptors = np.zeros((remote.num_pages, 3), np.uint64)
    numbers = np.arange(remote.num_pages, dtype=np.uint64)
    descriptors[:, 0] = remote.base + numbers * remote.page_bytes
    descriptors[:, 1] = remote.page_bytes
    return descriptors


# The producer's process.


class _Producer(NamedTuple):
    """The addresses of the producer's pages."""

    remote: PoolRegion
    descriptions: dict[str, bytes]  # by path
    bare_metadata: bytes
    port: int  # of the bare socket


def _produce(pipe: Any, core: int) -> None:
    """Serve the same pages on all paths, until the consumer closes the pipe."""
    os.sched_setaffinity(0, {core})
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    memory.pages[:] = content(_SEED, NUM_PAGES, PAGE_BYTES)
    producers = {name: make_backend(kind).serve(memory.pool, 2) for name, kind in BACKENDS.items()}
    bare = _bare_agent("bench-producer", memory.pool)
    descriptions = {}
    for name, producer in producers.items():
        producer.prepare(_CONSUMER).result()
        descriptions[name] = producer.admit(_CONSUMER)
        if producer.publications is not None:
            producer.publications.publish(_CONSUMER, np.arange(NUM_PAGES, dtype=np.int32))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = memoryview(memory.pages.reshape(-1))  # type: ignore[arg-type]
        threading.Thread(target=_serve_socket, args=(listener, served), daemon=True).start()
        port = listener.getsockname()[1]
        pipe.send(_Producer(memory.remote, descriptions, bare.get_agent_metadata(), port))
        pipe.recv()


def _serve_socket(listener: socket.socket, memory: memoryview) -> None:
    """Send each requested number of bytes from the start of the memory."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while len(asked := connection.recv(_ASK.size, socket.MSG_WAITALL)) == _ASK.size:
            connection.sendall(memory[: _ASK.unpack(asked)[0]])
