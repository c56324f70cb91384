"""Calls of the CUDA driver library, for functions that torch does not offer."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

_OUT_OF_MEMORY = 2


class CudaError(RuntimeError):
    """A failed call."""


class OutOfDeviceMemory(CudaError):
    """A call that failed because the device does not have enough memory."""


def call(function: str, *arguments: Any) -> None:
    """Call a library function. Raises CudaError with its name and the driver's error name."""
    driver = _driver()
    result = driver[function](*arguments)
    if result:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(name))
        kind = OutOfDeviceMemory if result == _OUT_OF_MEMORY else CudaError
        raise kind(f"{function}: {(name.value or b'?').decode()}")


@functools.cache
def device(index: int) -> ctypes.c_int:
    """Return the driver's handle of a device."""
    call("cuInit", ctypes.c_uint(0))
    handle = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index))
    return handle


def use(index: int) -> None:
    """Make a device current for this thread. Neither torch nor UCX does so reliably: torch makes a
    device current only when it needs one.
    """
    call("cuCtxSetCurrent", ctypes.c_void_p(_primary_context(index)))


def bytes_at(address: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the memory at an address as a uint8 tensor that does not own it.

    Raises:
        RuntimeError: there is no such memory. If it is another device's, torch returns a copy.
    """
    return torch.as_tensor(_CudaArray(address, shape), device=device)


class _CudaArray:
    """Memory at an address, in the form that torch imports without a copy."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": shape,
            "strides": None,
            "data": (address, False),
        }


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from None


@functools.cache
def _primary_context(index: int) -> int | None:
    """Return torch's own context, retained as long as the process lives."""
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device(index))
    return context.value
