"""Proof that a consumer can read a producer's host memory, before any KV depends on it. Used for
the data path cma.

The producer keeps random bytes in its memory and sends them, with their address, over the pair
stream. The consumer reads the address with process_vm_readv. If it finds the same bytes, it is on
the same host, has permission, and the process id names the producer (in another pid namespace it
would name another process).

A digest of the metadata of the producer's agent follows the random bytes. UCX aborts the process on
some forged metadata, so only metadata with this digest is used.
"""

import ctypes
import hashlib
import os
from pathlib import Path
from typing import Annotated

import msgspec

from common.errors import TransferError
from kvtransfer.backends.base import PagePool, parse_description

_NONCE_BYTES = 32
_DIGEST_BYTES = 32
_NAMESPACES = ("pid", "ipc")  # agents in different namespaces cannot connect
_SHARED_MEMORY = Path("/dev/shm")
_FREE_BYTES = 16 << 20  # UCX cannot create an agent with less
_MAX_ADDRESS = (1 << 57) - 1


_Namespace = Annotated[str, msgspec.Meta(max_length=64)]


class HostLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The location of the producer's nonce and of the digest behind it, and the nonce itself."""

    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    namespaces: Annotated[tuple[_Namespace, ...], msgspec.Meta(max_length=len(_NAMESPACES))]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    address: Annotated[int, msgspec.Meta(ge=1, le=_MAX_ADDRESS)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class Nonce:
    """Random bytes and a digest, at an address that is stable as long as the object lives."""

    def __init__(self, metadata: bytes) -> None:
        self._nonce = os.urandom(_NONCE_BYTES)
        self._memory = ctypes.create_string_buffer(self._nonce + _digest(metadata))

    def place(self) -> HostLocation:
        return HostLocation(
            boot_id=_boot_id(),
            namespaces=_namespaces(),
            pid=os.getpid(),
            address=ctypes.addressof(self._memory),
            nonce=self._nonce,
        )


class HostEvidence:
    """The producer's evidence for cma. Valid as long as the object lives."""

    def __init__(self, pool: PagePool, scratch: PagePool) -> None:
        """Raises TransferError if no agent can be created."""
        check_shared_memory()

    def describe(self, metadata: bytes) -> bytes:
        self._nonce = Nonce(metadata)
        return msgspec.msgpack.encode(self._nonce.place())


class SameHost:
    """The consumer's proof that it can read the producer's host memory."""

    path = "cma"

    def __init__(self, description: bytes, metadata: bytes, pool: PagePool) -> None:
        """Raises TransferError if the memory cannot be read."""
        check_shared_memory()
        prove_same_host(parse_description("cma", description, HostLocation), metadata)

    def close(self) -> None:
        """No-op: no resource is held."""


def check_shared_memory() -> None:
    """Raise TransferError if /dev/shm has too little space for agents."""
    try:
        state = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        raise TransferError(f"{_SHARED_MEMORY}: {error.strerror}") from None
    if state.f_flag & os.ST_RDONLY or not os.access(_SHARED_MEMORY, os.W_OK):
        raise TransferError(f"{_SHARED_MEMORY} cannot be written to")
    free = state.f_bavail * state.f_bsize
    if free < _FREE_BYTES:
        raise TransferError(
            f"{_SHARED_MEMORY} has {free >> 20} MiB left, UCX wants {_FREE_BYTES >> 20}"
        )


def prove_same_host(place: HostLocation, metadata: bytes) -> None:
    """Raise TransferError if memory at `place` is unreadable, or `metadata` not the producer's."""
    if place.boot_id != _boot_id():
        raise TransferError("the producer is on another host")
    if place.namespaces != (ours := _namespaces()):
        theirs = ", ".join(place.namespaces)
        raise TransferError(f"the producer is in namespaces {theirs}, not in {', '.join(ours)}")
    found = ctypes.create_string_buffer(_NONCE_BYTES + _DIGEST_BYTES)
    local = _Vector(ctypes.addressof(found), len(found))
    remote = _Vector(place.address, len(found))
    count = _libc.process_vm_readv(
        place.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, ctypes.c_ulong(0)
    )
    if count < 0:
        error = os.strerror(ctypes.get_errno())
        raise TransferError(f"reading process {place.pid}: {error}")
    nonce, digest = found.raw[:_NONCE_BYTES], found.raw[_NONCE_BYTES:]
    if nonce != place.nonce:
        raise TransferError(f"process {place.pid} is not the producer")
    if digest != _digest(metadata):
        raise TransferError("the metadata is not that of the producer's agent")


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def _digest(metadata: bytes) -> bytes:
    return hashlib.sha256(metadata).digest()


def _namespaces() -> tuple[str, ...]:
    """Return this process' namespaces, such as ("pid:[4026531836]", "ipc:[4026531839]")."""
    return tuple(os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
