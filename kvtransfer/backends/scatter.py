"""Scatter-gather transfer of pages between a blocking stream socket and memory, without a copy in
Python. Used by the tcp backend.

The pages of one call become one iovec each, selected from a table with numpy. The cost per page is
therefore the kernel's and not the interpreter's (Python's socket methods need a memoryview per
page).
"""

import ctypes
import errno
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import TransferError
from kvtransfer.backends.base import Ints, PageCut, PagePool

Vectors = NDArray[np.uint64]  # [n, 2]: address, bytes (the layout of struct iovec)

MAX_VECTORS = 1024  # IOV_MAX of Linux


class PageTable:
    """The address of every page of a pool. Costs 8 bytes a page."""

    def __init__(self, pool: PagePool) -> None:
        self._addresses = np.arange(pool.num_pages, dtype=np.uint64)
        self._addresses *= np.uint64(pool.page_bytes)
        self._addresses += np.uint64(pool.base)

    def vectors(self, pages: Ints, head: bytearray, cut: PageCut) -> Vectors:
        """Return the iovecs of `head`, then of the byte range `cut` of these pages, in order. Pages
        and cut must be in range. `head` must live as long as the vectors are used.
        """
        vectors = np.empty((len(pages) + 1, 2), np.uint64)
        vectors[0] = address_of(head), len(head)
        np.add(self._addresses.take(pages), np.uint64(cut.at), out=vectors[1:, 0])
        vectors[1:, 1] = cut.size
        return vectors


def address_of(memory: Any) -> int:
    """Return the address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _MessageHeader(ctypes.Structure):
    """struct msghdr of 64-bit Linux."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("num_vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.sendmsg.restype = ctypes.c_ssize_t
_libc.recvmsg.restype = ctypes.c_ssize_t


_WRITABLE = 0x200  # PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


def send_vectors(connection: socket.socket, vectors: Vectors, num_bytes: int) -> None:
    """Send the vectors, num_bytes in total. Calling `shutdown` on the socket from another thread
    interrupts it.

    Raises:
        OSError: the connection has failed.
    """
    _transfer(_libc.sendmsg, connection, vectors, num_bytes, socket.MSG_NOSIGNAL)


def receive_vectors(connection: socket.socket, vectors: Vectors, num_bytes: int) -> None:
    """Fill the vectors, num_bytes in total. Calling `shutdown` on the socket from another thread
    interrupts it.

    Raises:
        OSError: the connection has failed.
        TransferError: the peer closed it before the last byte.
    """
    _transfer(_libc.recvmsg, connection, vectors, num_bytes, socket.MSG_WAITALL)


def receive_before(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receive the next num_bytes. Raises TimeoutError at `deadline` by time.monotonic(), otherwise
    as `receive_vectors`. Leaves a timeout set on the socket.
    """
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        some = connection.recv(num_bytes - len(received))
        if not some:
            raise TransferError("the connection ended")
        received += some
    return received


def views(vectors: Vectors) -> Iterator[memoryview]:
    """Yield the memory of the vectors, in order. Adjacent vectors become one view."""
    starts = np.flatnonzero(vectors[1:, 0] != vectors[:-1, 0] + vectors[:-1, 1]) + 1
    starts = np.concatenate(([0], starts))
    sizes = np.add.reduceat(vectors[:, 1], starts)
    for address, num_bytes in zip(vectors[starts, 0].tolist(), sizes.tolist(), strict=True):
        yield _view(address, num_bytes, _WRITABLE)


def _transfer(
    call: "ctypes._NamedFuncPointer",
    connection: socket.socket,
    vectors: Vectors,
    num_bytes: int,
    flags: int,
) -> None:
    header = _MessageHeader()
    while True:
        header.vectors = address_of(vectors)
        header.num_vectors = min(len(vectors), MAX_VECTORS)
        count = call(connection.fileno(), ctypes.byref(header), flags)
        if count == num_bytes:
            return
        if count == 0:
            raise TransferError("the connection ended")
        if count > 0:
            vectors = _rest(vectors, count)
            num_bytes -= count
        elif (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _rest(vectors: Vectors, count: int) -> Vectors:
    """Return the vectors without their first `count` bytes."""
    ends = np.cumsum(vectors[:, 1])
    first = int(np.searchsorted(ends, count, side="right"))
    rest = vectors[first:].copy()
    done = np.uint64(count) - (ends[first] - vectors[first, 1])
    rest[0, 0] += done
    rest[0, 1] -= done
    return rest
