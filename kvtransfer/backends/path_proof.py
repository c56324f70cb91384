"""Proof that one process can copy another's host memory, before a byte of KV depends on it.

The owner keeps random bytes in its memory and tells them, with their address, over the pair
stream. A reader that finds the same bytes there with process_vm_readv is on the same host, means
the same process by that id (a pid of another namespace is another process), and is permitted.
"""

import ctypes
import os
from pathlib import Path
from typing import Annotated

import msgspec

from common.errors import TransferError
from kvtransfer.backends.base import PagePool, parse_description

_NONCE_BYTES = 32
_MAX_ADDRESS = (1 << 57) - 1


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the owner's nonce lies, and what it is."""

    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    address: Annotated[int, msgspec.Meta(ge=1, le=_MAX_ADDRESS)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class Nonce:
    """Random bytes in this process. They stay where they are for as long as the object lives."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(os.urandom(_NONCE_BYTES), _NONCE_BYTES)

    def place(self) -> Place:
        return Place(
            boot_id=_boot_id(),
            pid=os.getpid(),
            address=ctypes.addressof(self._memory),
            nonce=self._memory.raw,
        )


class HostEvidence:
    """An owner's. It counts for as long as the object lives."""

    def __init__(self, pool: PagePool, scratch: PagePool) -> None:
        self._nonce = Nonce()
        self.told = msgspec.msgpack.encode(self._nonce.place())


class SameHost:
    """A reader's finding that the owner's memory can be read directly."""

    path = "cma"

    def __init__(self, told: bytes, pool: PagePool) -> None:
        """Raises TransferError where it cannot."""
        prove_same_host(parse_description("cma", told, Place))

    def close(self) -> None:
        """Nothing to do: it holds nothing."""


def prove_same_host(place: Place) -> None:
    """Raises TransferError where that memory cannot be read directly."""
    if place.boot_id != _boot_id():
        raise TransferError("the owner is on another host")
    found = ctypes.create_string_buffer(_NONCE_BYTES)
    local = _Vector(ctypes.addressof(found), _NONCE_BYTES)
    remote = _Vector(place.address, _NONCE_BYTES)
    count = _libc.process_vm_readv(
        place.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, ctypes.c_ulong(0)
    )
    if count < 0:
        error = os.strerror(ctypes.get_errno())
        raise TransferError(f"reading process {place.pid}: {error}")
    if found.raw != place.nonce:
        raise TransferError(f"process {place.pid} is not the owner")


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
