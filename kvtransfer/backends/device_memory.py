"""Device operations of the backends: a pool's bytes as tensors, and ordered copies between host and
device.

`DeviceRuntime` is the interface. `CudaDevice` implements it, and tests replace it on machines
without a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from common.errors import TransferError
from kernels.cuda.driver import bytes_at
from kvtransfer.backends import cuda_driver
from kvtransfer.backends.base import PagePool
from kvtransfer.backends.scratch import scratch_pages

Direction = Literal["to host", "to device"]


class DeviceFailure(TransferError):
    """A failed device operation. The content of the memory concerned is unknown."""


class CopyMark(Protocol):
    """A position in a copy queue, after all copies added so far."""

    def wait(self) -> None:
        """Block until all copies before the mark have finished.

        Raises:
            DeviceFailure: one of them failed.
        """
        ...


class CopyQueue(Protocol):
    """Copies that run in the order in which they are added. Any thread may add, and all threads
    share the order.
    """

    def add(self, copies: Callable[[], object]) -> None:
        """Add a copy. `copies` is called now or later, and may enqueue work on the device. The
        memory that it uses must stay alive and unchanged until a later mark has been waited for.

        Raises:
            DeviceFailure: the copy could not be enqueued.
        """
        ...

    def mark(self) -> CopyMark: ...


class DeviceRuntime(Protocol):
    """One device, for any number of pools on it. Every method except `queue` may raise
    TransferError: the memory does not exist, or is on another device.
    """

    def use(self) -> None:
        """Make this device current for the calling thread. Every thread that uses the device calls
        it first. Otherwise calls without a device argument, such as waiting for a mark or pinning
        memory, would create a CUDA context of some hundred MiB on GPU 0.
        """
        ...

    def view(self, pool: PagePool) -> Tensor:
        """Return the pool's bytes as uint8 [num_pages, page_bytes], which do not own the memory."""
        ...

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate device memory that only copies use."""
        ...

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate pinned host memory."""
        ...

    def scratch(self, page_bytes: int) -> Tensor:
        """Return scratch pages for probes, without a request's data, uint8 [pages, page_bytes]."""
        ...

    def queue(self, direction: Direction) -> CopyQueue:
        """Return the shared copy queue of a direction."""
        ...


class CudaDevice:
    """A CUDA device of this process, with one copy stream for each direction.

    All callers share these two streams. torch hands out streams from a pool of 32 in turn, so a
    stream for every connection would at some point be a stream of the forward pass. Both have high
    priority, and forward passes use no stream of the high-priority pool.
    """

    def __init__(self, name: str) -> None:
        """Open the device "cuda" or "cuda:N". Raises TransferError if it does not exist."""
        index = int(name.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise TransferError(f"this process has no {name}")
        self.index = index
        self._device = torch.device("cuda", index)
        self._queues = {
            direction: _CudaQueue(torch.cuda.Stream(self._device, priority=-1))  # type: ignore[no-untyped-call]
            for direction in ("to host", "to device")
        }

    def use(self) -> None:
        cuda_driver.use(self.index)

    def view(self, pool: PagePool) -> Tensor:
        shape = (pool.num_pages, pool.page_bytes)
        with _failures(f"no memory of {self._device}"):
            tensor = bytes_at(pool.base, shape, self._device)
        # Torch made a copy, because the pool is on another device.
        if tensor.data_ptr() != pool.base:
            raise TransferError(f"no memory of {self._device}")
        return tensor

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        # Either stream would do. torch gives freed memory to the stream's next user at once, and
        # the previous user has already waited for its copies.
        with _failures(f"no memory on {self._device}"), self._queues["to device"].current():
            return torch.empty(shape, dtype=dtype, device=self._device)

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with _failures("no pinned memory"):
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def scratch(self, page_bytes: int) -> Tensor:
        memory = self.empty(scratch_pages(page_bytes), page_bytes, dtype=torch.uint8)
        queue = self._queues["to device"]
        queue.add(memory.zero_)
        queue.mark().wait()
        return memory

    def queue(self, direction: Direction) -> "_CudaQueue":
        return self._queues[direction]

    def read(self, address: int, num_bytes: int) -> bytes:
        """Copy device memory to host bytes. Blocks. The calling thread must have called `use`."""
        return cuda_driver.read(address, num_bytes, self._queues["to host"].stream)

    def write(self, pool: PagePool, values: Tensor) -> None:
        """Write `values`, uint8 in host memory, to the start of a pool. Blocks."""
        queue = self._queues["to device"]
        queue.add(partial(self.view(pool).view(-1)[: len(values)].copy_, values))
        queue.mark().wait()

    def synchronise(self) -> None:
        """Block until the device has finished all work of this process, on all streams, including
        destroyed ones.

        Raises:
            DeviceFailure: the device failed.
        """
        with _failures(f"{self._device} has failed"):
            torch.cuda.synchronize(self._device)


@cache
def cuda_device(name: str) -> CudaDevice:
    """Return the device of that name. Raises TransferError if it does not exist."""
    return CudaDevice(name)


class _CudaQueue:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @property
    def stream(self) -> int:
        """Return the driver's handle of the stream."""
        handle: int = self._stream.cuda_stream
        return handle

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):  # also makes its device current in this thread
            yield

    def add(self, copies: Callable[[], object]) -> None:
        with _failures("a copy could not be enqueued"), self.current():
            copies()

    def mark(self) -> "_CudaMark":
        with _failures("a copy could not be marked"):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting threads sleep
            event.record(self._stream)
        return _CudaMark(event)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        with _failures("a copy has failed"):
            self._event.synchronize()


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turn RuntimeError, which torch raises for every device failure, into DeviceFailure."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFailure(f"{what}: {str(error).partition(chr(10))[0]}") from None
