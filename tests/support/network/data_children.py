"""Child processes for tests of the data paths: a producer, a consumer, a nonce.

Children are forked from a server that has loaded nixl once and has no agent: a start takes 10 ms
instead of 2 s. Children that use a GPU are not forked but started in advance, because a forked
process cannot use its parent's GPU. Each child writes its output to a file, so that a test can
check that nothing was printed.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import TransferError
from kvtransfer.backends.base import Ints, PagePool, PoolRegion, TransferBackend
from kvtransfer.backends.nixl.agent import NixlAgent
from kvtransfer.backends.nixl.backend import NixlBackend
from kvtransfer.backends.nixl.paths import PATHS, NixlTransports, PathKind
from kvtransfer.backends.path_proof import HostEvidence, Nonce, SameHost
from kvtransfer.backends.tcp.backend import TcpBackend
from kvtransfer.backends.tcp.staging import StagedMemory
from tests.support.hardware.device_twin import DeviceTwin

_FLAGS = {"ipc": 0x08000000, "pid": 0x20000000}  # CLONE_NEWIPC, CLONE_NEWPID
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_PRIVATE = 0x00044000  # MS_REC | MS_PRIVATE
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

_libc = ctypes.CDLL(None, use_errno=True)
CONSUMER = 0xD0D0
REPLY_S = 60.0
CANARY = 0xA5
CUDA = "cuda:0"
_NUM_SPARES = 4
_context = multiprocessing.get_context("forkserver")


class ProvedSockets(SameHost):
    path = "sockets"


# UCX has only sockets, whatever the proof says, so reads over them need the producer's progress.
# Sockets of a fast machine reach more than the 2 GiB/s of real paths, and none reaches this limit.
SOCKETS = PathKind(
    "sockets",
    "cpu",
    NixlTransports("tcp,self,cuda_copy", errors="peer", polled=True),
    HostEvidence,
    ProvedSockets,
    4 << 20,
    min_gib_per_s=1e6,
)
# A stand-in for RDMA: read keys end with the producer's agent, which is polled.
KEYED = replace(SOCKETS, name="keyed", min_gib_per_s=0.0, keyed=True)


def leave(namespace: str) -> None:
    """Continue in a process with its own "ipc" or "pid" namespace. "": in this process.

    Raises OSError if that is not permitted.
    """
    if not namespace:
        return
    _done(_libc.unshare(_FLAGS[namespace] | (_NEW_MOUNTS if namespace == "pid" else 0)))
    if namespace == "pid":
        if child := os.fork():  # only children are in the new namespace
            os.waitpid(child, 0)
            os._exit(0)
        _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        _done(_libc.mount(None, b"/", None, _PRIVATE, None))
        _done(_libc.mount(b"proc", b"/proc", b"proc", 0, None))


def _done(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class CudaPages:
    """Pages on a GPU, uint8 [num_pages, page_bytes]. Accesses copy them to the host."""

    def __init__(self, num_pages: int, page_bytes: int, device: str) -> None:
        self._tensor = torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device)

    @property
    def address(self) -> int:
        return self._tensor.data_ptr()

    def copy(self) -> NDArray[np.uint8]:
        copied: NDArray[np.uint8] = self._tensor.cpu().numpy()
        return copied

    def __getitem__(self, key: Any) -> Any:
        return self.copy()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        pages = self.copy()
        pages[key] = value
        self._tensor.copy_(torch.from_numpy(pages))
        torch.cuda.synchronize()

    def __eq__(self, other: object) -> Any:
        return self.copy() == other

    def __ne__(self, other: object) -> Any:
        return self.copy() != other

    __hash__ = None  # type: ignore[assignment]


_context.set_forkserver_preload(
    ["tests.support.network.data_children", "tests.support.processes.preload_nixl"]
)


class StagedTcp(TcpBackend):
    """A tcp backend with staging as between GPUs, on a machine without GPUs."""

    name = "tcp-staged"

    def __init__(self) -> None:
        twin = DeviceTwin()
        super().__init__("127.0.0.1", lambda pool: StagedMemory(pool, twin))


class EncryptedTcp(TcpBackend):
    name = "tcp-tls"

    def __init__(self) -> None:
        super().__init__("127.0.0.1", encrypted=True)


class TwoPathNixl(NixlBackend):
    """A nixl backend whose better path fails its proof."""

    name = "nixl-two-paths"

    def __init__(self) -> None:
        super().__init__((SOCKETS, PATHS[0]))


class KeyedNixl(NixlBackend):
    """A nixl backend with the paths between hosts, on a machine without RDMA."""

    name = "nixl-keyed"

    def __init__(self) -> None:
        super().__init__((KEYED,))


class CudaTcp(TcpBackend):
    name = "tcp-cuda"


class CudaNixl(NixlBackend):
    name = "nixl-cuda"


BACKENDS: Mapping[str, Callable[[], TransferBackend]] = {
    "nixl": NixlBackend,
    "nixl-two-paths": TwoPathNixl,
    "nixl-keyed": KeyedNixl,
    "nixl-cuda": CudaNixl,
    "tcp": partial(TcpBackend, "127.0.0.1"),
    "tcp-cuda": partial(CudaTcp, "127.0.0.1"),
    "tcp-staged": StagedTcp,
    "tcp-tls": EncryptedTcp,
}


def make_backend(name: str) -> TransferBackend:
    """Return the backend with this name. Names that end in -cuda use the memory of a GPU."""
    return BACKENDS[name]()


class Memory:
    """A pool of this process with random content."""

    def __init__(self, num_pages: int, page_bytes: int, fill: int = CANARY) -> None:
        self.pages: NDArray[np.uint8] = np.full((num_pages, page_bytes), fill, np.uint8)
        self.pool = PagePool(self.pages.ctypes.data, page_bytes, num_pages, "cpu")
        self.remote = PoolRegion(self.pool.base, page_bytes, num_pages)


class CudaMemory(Memory):
    """A pool on a GPU. `pages` is read and written as arrays of host memory."""

    def __init__(self, num_pages: int, page_bytes: int, device: str = CUDA) -> None:
        pages = CudaPages(num_pages, page_bytes, device)
        self.pages = pages  # type: ignore[assignment]
        self.pages[:] = CANARY
        self.pool = PagePool(pages.address, page_bytes, num_pages, device)
        self.remote = PoolRegion(self.pool.base, page_bytes, num_pages)


def make_memory(backend: str, num_pages: int, page_bytes: int) -> Memory:
    """Allocate memory on the device that the named backend needs."""
    kind = CudaMemory if backend.endswith("-cuda") else Memory
    return kind(num_pages, page_bytes)


def content(seed: int, num_pages: int, page_bytes: int) -> NDArray[np.uint8]:
    """Return the page contents of a producer with that seed. All pages differ."""
    return np.random.default_rng(seed).integers(0, 256, (num_pages, page_bytes), np.uint8)


def scattered(seed: int, num_pages: int, count: int) -> tuple[Ints, Ints]:
    """Return (source pages, destination pages), each distinct and in random order."""
    rng = np.random.default_rng(seed)
    source, destination = (rng.permutation(num_pages)[:count].astype(np.int32) for _ in range(2))
    return source, destination


class NearProducer:
    """A producer in this process."""

    def __init__(
        self, backend: TransferBackend, num_pages: int, page_bytes: int, *, seed: int
    ) -> None:
        self.content = content(seed, num_pages, page_bytes)
        self._memory = make_memory(backend.name, num_pages, page_bytes)
        self._memory.pages[:] = self.content
        self._producer = backend.serve(self._memory.pool, seed)
        self.remote = self._memory.remote
        self.poll = self._producer.poll
        self.dismiss = self._producer.dismiss
        self.end = self._producer.close

    def admit(self, consumer: int = CONSUMER) -> bytes:
        self._producer.prepare(consumer).result(REPLY_S)
        return self._producer.admit(consumer)

    def publish(self, consumer: int, pages: Ints) -> None:
        if self._producer.publications is not None:
            self._producer.publications.publish(consumer, pages)

    def withdraw(self, consumer: int, pages: Ints) -> None:
        if self._producer.publications is not None:
            self._producer.publications.withdraw(consumer, pages)

    def publish_all(self, consumer: int = CONSUMER) -> None:
        self.publish(consumer, np.arange(len(self.content), dtype=np.int32))


class Child:
    """A process with a pipe. Its function replies to every message with one message."""

    def __init__(
        self, program: Callable[..., None], *arguments: Any, log: Path, on_gpu: bool = False
    ) -> None:
        start = _start_on_gpu if on_gpu else _start
        self._process, self._pipe = start(program, str(log), *arguments)

    def receive(self, timeout_s: float = REPLY_S) -> Any:
        assert self._pipe.poll(timeout_s), "the other process does not answer"
        return self._pipe.recv()

    def ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        return self.receive()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return int(pid)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(REPLY_S)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _start(program: Callable[..., None], log: str, *arguments: Any) -> tuple[Any, Pipe]:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_run, args=(program, theirs, log, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


_spares: deque[tuple[Any, Pipe]] = deque()


def _start_on_gpu(program: Callable[..., None], log: str, *arguments: Any) -> tuple[Any, Pipe]:
    while len(_spares) <= _NUM_SPARES:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_wait_on_gpu, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _spares.append((process, ours))
    process, ours = _spares.popleft()
    ours.send((program, log, arguments))
    return process, ours


# Runs in the child.


def _run(program: Callable[..., None], pipe: Pipe, log: str, *arguments: Any) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    try:
        program(pipe, *arguments)
    except EOFError:
        os._exit(0)  # the test has ended


def _wait_on_gpu(pipe: Pipe) -> None:
    CudaMemory(1, 16)  # before the first agent, which checks for a CUDA context
    NixlAgent().destroy()  # loads the plugins
    program, log, arguments = pipe.recv()
    _run(program, pipe, log, *arguments)


def nonce_program(pipe: Pipe) -> None:
    nonce = Nonce(b"metadata")
    pipe.send(nonce.place())
    pipe.recv()


def producer_program(
    pipe: Pipe, apart: str, backend: str, num_pages: int, page_bytes: int, seed: int
) -> None:
    try:
        leave(apart)
    except OSError as refusal:
        pipe.send(str(refusal))
        return
    producer = NearProducer(make_backend(backend), num_pages, page_bytes, seed=seed)
    pipe.send(producer.remote)
    while True:
        producer.poll()
        if pipe.poll(0.001):
            name, *arguments = pipe.recv()
            pipe.send(getattr(producer, name)(*arguments))


def consumer_program(pipe: Pipe, backend: str, num_pages: int, page_bytes: int) -> None:
    memory = make_memory(backend, num_pages, page_bytes)
    path = make_backend(backend)
    rng = np.random.default_rng()
    pipe.send("started")
    while True:
        description, remote, expected = pipe.recv()
        connection = path.connect(description, remote, memory.pool)
        source, destination = scattered(1, num_pages, num_pages)
        connection.copy(source, destination)
        right = bool((memory.pages[destination] == expected[source]).all())
        pipe.send("landed" if right else "wrong bytes")
        try:
            while True:
                rng.shuffle(source)
                connection.copy(source, destination)
        except TransferError as error:
            pipe.send(str(error))
        connection.close()
