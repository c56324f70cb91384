"""CUDA driver and NVML functions that torch lacks: memory shared between processes, and NVLink
topology. Used by device_proof.py and device_memory.py.

NVML is called directly, because every machine with a GPU has it. Every function may raise
TransferError with the driver's message.
"""

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common.errors import TransferError
from kernels.cuda import driver

HANDLE_BYTES = 64
UUID_BYTES = 16

_LAZY_ENABLE_PEER_ACCESS = 1
_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


def use(index: int) -> None:
    """Make the device current for the calling thread."""
    with _failures():
        driver.use(index)


def device_uuid(index: int) -> bytes:
    """Return the UUID_BYTES of the device, which are unique across hosts."""
    found = (ctypes.c_ubyte * UUID_BYTES)()
    with _failures():
        driver.call("cuDeviceGetUuid", found, driver.device(index))
    return bytes(found)


def share(address: int) -> tuple[bytes, int]:
    """Return a handle with which other processes of this host can map the allocation that contains
    `address`.

    Returns:
        (HANDLE_BYTES for `map_shared`, offset in bytes of `address` in the allocation).
    """
    base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2",
        ctypes.byref(base),
        ctypes.byref(num_bytes),
        ctypes.c_uint64(address),
    )
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle.bytes), address - base.value


def map_shared(handle: bytes) -> int:
    """Map another process' allocation on the current device, and return its address. The memory
    stays allocated, even after that process ends, until each map has been unmapped.
    """
    address = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
    )
    return address.value


def unmap_shared(address: int) -> None:
    """Undo one `map_shared`."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def read(address: int, num_bytes: int, stream: int) -> bytes:
    """Copy device memory to host bytes on `stream`. Blocks."""
    found = ctypes.create_string_buffer(num_bytes)
    _call(
        "cuMemcpyDtoHAsync_v2",
        found,
        ctypes.c_uint64(address),
        ctypes.c_size_t(num_bytes),
        ctypes.c_void_p(stream),
    )
    _call("cuStreamSynchronize", ctypes.c_void_p(stream))
    return found.raw


def joined_by_nvlink(one: bytes, other: bytes) -> bool:
    """Return whether NVML reports an NVLink connection between two devices, named by UUID. False if
    NVML cannot report it.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    if nvml.nvmlInit_v2():
        return False
    devices = []
    for name in (one, other):
        device = ctypes.c_void_p()
        text = f"GPU-{uuid.UUID(bytes=name)}".encode()
        if nvml.nvmlDeviceGetHandleByUUID(text, ctypes.byref(device)):
            return False
        devices.append(device)
    status = ctypes.c_int(-1)
    failed = nvml.nvmlDeviceGetP2PStatus(*devices, _P2P_NVLINK, ctypes.byref(status))
    return not failed and status.value == 0


def _call(function: str, *arguments: Any) -> None:
    with _failures():
        driver.call(function, *arguments)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except driver.CudaError as error:
        raise TransferError(str(error)) from None
