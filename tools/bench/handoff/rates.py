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
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.backends.base import BackendConnection, Ints, PagePool, PoolRegion, TransferBackend
from kvtransfer.backends.nixl.agent import load
from kvtransfer.backends.nixl.backend import NixlBackend
from kvtransfer.backends.nixl.paths import HOST
from kvtransfer.backends.tcp.backend import TcpBackend
from tools.bench.support.record import ROOT
from tools.bench.support.systems import cpu_seconds_of

COUNTS = (1, 4, 16, 64, 256, 1024, 4096)
PATHS = {"tcp": "bare socket", "nixl": "bare nixl"}  # path of Baton: its bare peer
GOAL = 0.95

_GIB = 1 << 30
_CONSUMER = 1
_ASK = struct.Struct("<Q")  # request of the bare socket: number of bytes


@dataclass(frozen=True, slots=True)
class Plan:
    page_bytes: int
    rounds: int
    counts: tuple[int, ...] = COUNTS


def measure(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return one row per number of pages, and the goals.

    Raises TransferError if a path is missing.
    """
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as exits:
        producer = _ProducerProcess(plan, core=cores[-1])
        exits.callback(producer.end)
        exits.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, cores[:1])
        target = _Pages(plan)
        bare_socket = exits.enter_context(socket.create_connection(("127.0.0.1", producer.port), 5))
        bare_socket.settimeout(None)
        bare_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bare_nixl = _BareNixl(producer, target)
        tcp, tls, nixl = (
            _connected(name, producer, target, exits) for name in ("tcp", "tls", "nixl")
        )
        reads: dict[str, Callable[[Ints, Ints], None]] = {
            "memcpy": _memcpy(target),
            "bare socket": _socket_read(bare_socket, target),
            "tcp": tcp.copy,
            "tls": tls.copy,
            "bare nixl": bare_nixl.read,
            "nixl": nixl.copy,
        }
        _prove(reads, producer, target, plan)
        rows = [_row(count, reads, bare_nixl, producer, plan) for count in plan.counts]
    of_bare = {path: {row["pages"]: row[f"{path}_of_bare"] for row in rows} for path in PATHS}
    met = {path: min(of_bare[path].values()) >= GOAL for path in PATHS}
    return rows, {"goal_of_bare": GOAL, "of_bare": of_bare, "met_everywhere": met}


def _row(
    count: int,
    reads: dict[str, Callable[[Ints, Ints], None]],
    bare_nixl: "_BareNixl",
    producer: "_ProducerProcess",
    plan: Plan,
) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    num_pages = max(plan.counts)
    seconds: dict[str, list[float]] = {name: [] for name in reads}
    cpu_seconds = dict.fromkeys(reads, 0.0)
    posts: list[float] = []
    # A sample with few pages consists of many reads of different pages, to last long enough for the
    # clock.
    repeats = max(1, min(200, num_pages // (4 * count)))
    for round_number in range(plan.rounds + 1):
        ids = [(_some(rng, num_pages, count), _some(rng, num_pages, count)) for _ in range(repeats)]
        for name, read in reads.items():
            cpu_before, started = producer.cpu_seconds() + time.process_time(), time.perf_counter()
            for source, destination in ids:
                read(source, destination)
            cpu_seconds[name] += producer.cpu_seconds() + time.process_time() - cpu_before
            if round_number:  # the first one is the warm-up
                seconds[name].append((time.perf_counter() - started) / repeats)
        posts += [bare_nixl.post_seconds(*pair) for pair in ids]
    num_bytes = count * plan.page_bytes
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "pages": count,
        "bytes": num_bytes,
        "gib_per_s": {name: round(num_bytes / _GIB / s, 3) for name, s in median.items()},
        "cpu_s_per_gib": {  # both ends. The producer's in steps of 10 ms
            name: round(s * _GIB / (num_bytes * repeats * (plan.rounds + 1)), 3)
            for name, s in cpu_seconds.items()
        },
        "us": {name: round(s * 1e6, 1) for name, s in median.items()},
        **{
            f"{ours}_of_bare": round(
                statistics.median(b / o for b, o in zip(seconds[bare], seconds[ours], strict=True)),
                3,
            )
            for ours, bare in PATHS.items()
        },
        "nixl_descriptors": count,
        "nixl_post_us": round(statistics.median(posts) * 1e6, 1),
    }


def _some(rng: np.random.Generator, num_pages: int, count: int) -> Ints:
    return rng.choice(num_pages, count, replace=False).astype(np.int32)


def _prove(
    reads: dict[str, Callable[[Ints, Ints], None]],
    producer: "_ProducerProcess",
    target: "_Pages",
    plan: Plan,
) -> None:
    """Check the bytes before rates are reported."""
    pages = np.random.default_rng(0).permutation(max(plan.counts)).astype(np.int32)
    expected = _content(plan)
    for name in ("tcp", "tls", "bare nixl", "nixl"):
        target.pages[:] = 0
        reads[name](pages, pages[::-1].copy())
        if not (target.pages[pages[::-1]] == expected[pages]).all():
            raise AssertionError(f"{name} brought wrong bytes")


class _Pages:
    """A pool as large as the largest read."""

    def __init__(self, plan: Plan) -> None:
        self.pages: NDArray[np.uint8] = np.zeros((max(plan.counts), plan.page_bytes), np.uint8)
        self.pages[:] = 1  # causes the page faults before the measurement
        num_pages = max(plan.counts)
        self.pool = PagePool(self.pages.ctypes.data, plan.page_bytes, num_pages, "cpu")
        self.remote = PoolRegion(self.pool.base, plan.page_bytes, num_pages)


def _content(plan: Plan) -> NDArray[np.uint8]:
    rng = np.random.default_rng(7)
    return rng.integers(0, 256, (max(plan.counts), plan.page_bytes), np.uint8)


def _memcpy(target: _Pages) -> Callable[[Ints, Ints], None]:
    source = np.ones_like(target.pages)

    def read(source_pages: Ints, destination_pages: Ints) -> None:
        np.copyto(target.pages[: len(source_pages)], source[: len(source_pages)])

    return read


def _socket_read(connection: socket.socket, target: _Pages) -> Callable[[Ints, Ints], None]:
    flat = memoryview(target.pages.reshape(-1))  # type: ignore[arg-type]

    def read(source_pages: Ints, destination_pages: Ints) -> None:
        wanted = len(source_pages) * target.pool.page_bytes
        connection.sendall(_ASK.pack(wanted))
        got = 0
        while got < wanted:
            got += connection.recv_into(flat[got:wanted], 0, socket.MSG_WAITALL)

    return read


class _BareNixl:
    """NIXL with only a single READ of all pages."""

    def __init__(self, producer: "_ProducerProcess", target: _Pages) -> None:
        self._agent = _bare_agent("bench-consumer")
        self._agent.register_memory(_region(target.pool), "DRAM")
        name = self._agent.add_remote_agent(producer.bare_metadata)
        self._local = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", _descriptors(target.remote), "DRAM"
        )
        self._remote = self._agent.prep_xfer_dlist(name, _descriptors(producer.remote), "DRAM")
        first = np.zeros(1, np.int32)
        self.read(first, first)  # establishes the connection

    def read(self, source_pages: Ints, destination_pages: Ints) -> None:
        handle = self._agent.make_prepped_xfer(
            "READ", self._local, destination_pages, self._remote, source_pages
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        handle.release()
        assert state == "DONE"

    def post_seconds(self, source_pages: Ints, destination_pages: Ints) -> float:
        """Return the seconds to post one request of these descriptors. CMA copies in post."""
        started = time.perf_counter()
        handle = self._agent.make_prepped_xfer(
            "READ", self._local, destination_pages, self._remote, source_pages
        )
        seconds = time.perf_counter() - started
        handle.release()
        return seconds


def _bare_agent(name: str) -> Any:
    """Return an agent with the transports of host memory, the defaults of `load`."""
    api = load()
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": HOST.errors})
    return agent


def _region(pool: PagePool) -> NDArray[np.uint64]:
    return np.array([[pool.base, pool.num_pages * pool.page_bytes, 0]], np.uint64)


def _descriptors(remote: PoolRegion) -> NDArray[np.uint64]:
    descriptors = np.zeros((remote.num_pages, 3), np.uint64)
    numbers = np.arange(remote.num_pages, dtype=np.uint64)
    descriptors[:, 0] = remote.base + numbers * remote.page_bytes
    descriptors[:, 1] = remote.page_bytes
    return descriptors


def _backends() -> dict[str, TransferBackend]:
    return {
        "tcp": TcpBackend("127.0.0.1"),
        "tls": TcpBackend("127.0.0.1", encrypted=True),
        "nixl": NixlBackend(),
    }


def _connected(
    name: str, producer: "_ProducerProcess", target: _Pages, exits: ExitStack
) -> BackendConnection:
    connection = _backends()[name].connect(
        producer.descriptions[name], producer.remote, target.pool
    )
    exits.callback(connection.close)
    return connection


class _Served(msgspec.Struct):
    """The output of the producer's process."""

    base: int
    descriptions: dict[str, bytes]
    bare_metadata: bytes
    port: int


class _ProducerProcess:
    """The producer's process. multiprocessing would import the caller's main module."""

    def __init__(self, plan: Plan, core: int) -> None:
        numbers = (plan.page_bytes, max(plan.counts), core)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.handoff.rates", *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        served = msgspec.json.decode(self._process.stdout.readline(), type=_Served)
        self.remote = PoolRegion(served.base, plan.page_bytes, max(plan.counts))
        self.descriptions = served.descriptions
        self.bare_metadata = served.bare_metadata
        self.port = served.port

    def cpu_seconds(self) -> float:
        return cpu_seconds_of(self._process.pid)

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(5)


def _own(page_bytes: int, num_pages: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    plan = Plan(page_bytes, 0, (num_pages,))
    pages = _Pages(plan)
    pages.pages[:] = _content(plan)
    producers = {name: backend.serve(pages.pool, 2) for name, backend in _backends().items()}
    bare = _bare_agent("bench-producer")
    bare.register_memory(_region(pages.pool), "DRAM")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _serve_socket(listener, memoryview(pages.pages.reshape(-1)))  # type: ignore[arg-type]
        for producer in producers.values():
            producer.prepare(_CONSUMER).result()
        descriptions = {name: producer.admit(_CONSUMER) for name, producer in producers.items()}
        for producer in producers.values():
            if producer.publications is not None:
                producer.publications.publish(_CONSUMER, np.arange(num_pages, dtype=np.int32))
        served = _Served(
            pages.pool.base, descriptions, bare.get_agent_metadata(), listener.getsockname()[1]
        )
        print(msgspec.json.encode(served).decode(), flush=True)
        sys.stdin.read()  # until the consumer closes its end


def _serve_socket(listener: socket.socket, memory: memoryview) -> None:
    """Send each requested number of bytes from the start of the memory. Runs on its own thread."""

    def serve() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while len(asked := connection.recv(_ASK.size, socket.MSG_WAITALL)) == _ASK.size:
                connection.sendall(memory[: _ASK.unpack(asked)[0]])

    threading.Thread(target=serve, daemon=True).start()


if __name__ == "__main__":
    _own(*map(int, sys.argv[1:]))
