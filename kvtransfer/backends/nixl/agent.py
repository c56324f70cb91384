"""A thin wrapper of a nixl agent: one thread, errors of this code base, and a reliable end.

An agent copies for as long as it exists, whatever its handles report. It exists for as long as
anything refers to it: its descriptor lists, its transfer handles, the frames of a traceback. This
class is the only place that holds such references, and `destroy` checks that none is left.
"""

import logging
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from common.errors import EngineFault, TransferError
from kvtransfer.backends.base import Ints, PageCut, PagePool


@dataclass(frozen=True, slots=True)
class NixlTransports:
    """All transports that an agent may use, in UCX's words. The user's environment has no effect.

    Never tcp: it listens on every interface and lets any sender write to any address. UCX needs one
    transport for messages. On one host that is `posix`: memory for this user alone, behind
    /proc/<pid>/fd, so without a public name, and unreachable wherever another process' memory is
    unreachable. `sysv` would be open to the group, and reachable where that memory is not.
    """

    names: str
    # UCX's handling of peers that are gone. It refuses posix with "peer". With "none", a read from
    # a process that has ended still fails, because the kernel reports it.
    errors: Literal["none", "peer"]
    # Whether a producer must be polled while a consumer connects. Over shared memory it need not
    # even run: a consumer has connected to, and read for 40 s from, a producer stopped by SIGSTOP.
    polled: bool = False
    devices: Callable[[], str] = lambda: "all"  # of the network. May raise TransferError


# Nixl rejects an agent that cannot recognise GPU memory on a machine that has a GPU.
HOST = NixlTransports("cma,posix,cuda_copy", errors="none")

_TRANSPORTS, _DEVICES, _LINK = "UCX_TLS", "UCX_NET_DEVICES", "UCX_POSIX_USE_PROC_LINK"
_ENVIRONMENT = {
    _TRANSPORTS: HOST.names,  # for agents made elsewhere; Agent sets its own
    _DEVICES: "all",
    # Otherwise the memory has a name in /dev/shm and stays there when its process is killed.
    _LINK: "y",
    # Agents send nothing through the memory they meet in: 90 KB of /dev/shm for each instead of 4.3
    # MB, where containers have 64 MB.
    "UCX_POSIX_FIFO_SIZE": "64",
    "UCX_POSIX_SEG_SIZE": "1024",
    "UCX_POSIX_RX_BUFS_GROW": "64",
    # Without it, UCX does not read between GPUs that have no NVLink without the producer's help.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y",
    # Otherwise UCX keeps the memory of every producer, also of dead ones, mapped until this process
    # ends, so that it cannot be reused. device_proof.py keeps it mapped while it is needed.
    "UCX_CUDA_IPC_CACHE": "n",
    # Both write to stderr whenever a peer dies. The relevant part reaches the caller as an
    # exception.
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}
_import_lock = threading.Lock()
_log = logging.getLogger(__name__)


class NixlAgent:
    """A nixl agent, for one thread at a time. Every method but `destroy` may raise
    TransferError.
    """

    def __init__(self, transports: NixlTransports = HOST) -> None:
        """Make an agent for these transports. Takes 10 ms, the first one of a process 2 s. A path
        is proved for these transports only.
        """
        self._lists: list[Any] = []
        self._reading: Any = None
        self._agent = _call(_new_agent, transports)

    def register(self, pool: PagePool) -> None:
        """Register a pool. Device memory must be that of the calling thread's device."""
        whole = PagePool(pool.base, pool.num_pages * pool.page_bytes, 1, pool.device)
        rows = descriptors(whole, [PageCut(0, whole.page_bytes)])
        _call(self._agent.register_memory, rows, segment(pool.device)[0])

    def metadata(self) -> bytes:
        """Return the metadata for another agent's `meet`, covering all memory registered so far."""
        return bytes(_call(self._agent.get_agent_metadata))

    def meet(self, metadata: bytes) -> Any:
        """Return the other agent's name, for `prepare`. UCX aborts the process on some forged
        metadata: pass only metadata that has been proved to be the producer's.
        """
        try:
            return _call(self._agent.add_remote_agent, metadata)
        except TransferError as error:
            raise TransferError(f"the producer's agent is out of reach: {error}") from None

    def prepare(
        self, pool: PagePool, parts: Sequence[PageCut], remote: Any = "NIXL_INIT_AGENT"
    ) -> int:
        """Prepare these parts of the pages of this process, or of the agent of that name. Part p of
        page i has the index p * num_pages + i. Returns a number for `post_read`.
        """
        kind, _ = segment(pool.device)
        made = _call(self._agent.prep_xfer_dlist, remote, descriptors(pool, parts), kind)
        self._lists.append(made)
        return len(self._lists) - 1

    def post_read(self, local: int, here: Ints, remote: int, there: Ints) -> bool:
        """Start a read of these indices. Returns True if it has landed already. CMA copies inside
        this call."""
        return self._has_landed(_call(self._begin, local, here, remote, there))

    def read_has_landed(self) -> bool:
        """Return whether the latest read has landed. Call only until it returns True."""
        return self._has_landed(_call(self._agent.check_xfer_state, self._reading))

    def poll(self) -> None:
        """Let other agents make contact."""
        _call(self._agent.get_new_notifs)

    def destroy(self) -> None:
        """End the agent, and with it every read in progress. Idempotent.

        Raises:
            EngineFault: a reference to the agent is left, so that bytes may still land.
        """
        if self._agent is None:
            return
        agent = weakref.ref(self._agent.agent)
        _release(self._reading)
        self._reading = None
        while self._lists:
            _release(self._lists.pop())
        self._agent = None
        if agent() is not None:
            raise EngineFault("a nixl agent outlives its connection")

    def _begin(self, local: int, here: Ints, remote: int, there: Ints) -> Any:
        self._reading = self._agent.make_prepped_xfer(
            "READ", self._lists[local], here, self._lists[remote], there
        )
        return self._agent.transfer(self._reading)

    def _has_landed(self, state: str) -> bool:
        match state:
            case "DONE":
                _release(self._reading)
                self._reading = None
                return True
            case "PROC":
                return False
            case _:
                raise TransferError(f"nixl: the read ended as {state}")


def segment(device: str) -> tuple[str, int]:
    """Return nixl's word for the memory of a PagePool's device, and the device's number."""
    if device == "cpu":
        return "DRAM", 0
    return "VRAM", int(device.partition(":")[2] or 0)


def descriptors(pool: PagePool, parts: Sequence[PageCut]) -> NDArray[np.uint64]:
    """Return [num_parts * num_pages, 3]: address, bytes and device of each part of each page."""
    made = np.empty((len(parts), pool.num_pages, 3), np.uint64)
    made[:, :, 0] = np.arange(pool.num_pages, dtype=np.uint64)
    made[:, :, 0] *= np.uint64(pool.page_bytes)
    made[:, :, 0] += np.uint64(pool.base)
    for number, (at, size) in enumerate(parts):
        made[number, :, 0] += np.uint64(at)
        made[number, :, 1] = size
    made[:, :, 2] = segment(pool.device)[1]
    return made.reshape(-1, 3)


def load() -> Any:
    """Load the Python API of nixl. Sets defaults for variables that the user's
    environment lacks.
    """
    with _import_lock:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # UCX reads most of them when it is loaded
        import nixl._api as api
    return api


def _new_agent(transports: NixlTransports) -> Any:
    api = load()
    agent = api.nixl_agent(
        uuid.uuid4().hex, api.nixl_agent_config(enable_prog_thread=False, backends=[])
    )
    if "UCX" not in agent.get_plugin_list():
        raise TransferError("its UCX plugin is missing")
    forced = {_TRANSPORTS: transports.names, _LINK: _ENVIRONMENT[_LINK]}
    with _import_lock, _set(forced | {_DEVICES: transports.devices()}):
        agent.create_backend("UCX", {"ucx_error_handling_mode": transports.errors})
    return agent


@contextmanager
def _set(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily, because UCX reads them again for every agent. They
    exist already: the C library replaces their values in place, which disturbs no other thread that
    reads the environment.
    """
    before = {name: os.environ[name] for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.update(before)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call into nixl. The errors raised must not refer to the agent: the frames of an error that is
    still being raised would keep the agent alive through its own `destroy`.
    """
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 the errors of nixl have no base of their own
        error.__traceback__ = None
        del function, arguments
        raise TransferError(f"nixl: {error}") from None


def _release(handle: Any) -> None:
    """Release a handle. Nixl may refuse while a read is in progress, which does not matter: the end
    of the agent is the fence.
    """
    if handle is not None:
        try:
            handle.release()
        except Exception as error:  # noqa: BLE001 as above
            _log.debug("nixl handle not released: %s", error)
