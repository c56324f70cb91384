"""What the backends need of the device that a pool is on: its bytes as tensors, copies in order.

`Device` is the seam: `CudaDevice` is the real one, and anything that keeps the same promises may
stand in for it where there is none. Knows pools as addresses, not whose pages they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from common.errors import TransferError
from kvtransfer.backends import cuda_driver
from kvtransfer.backends.base import PagePool
from kvtransfer.backends.scratch import scratch_pages

Direction = Literal["to host", "to device"]


class DeviceFailure(TransferError):
    """The device did not do what it was told to. Nothing is known of the memory concerned."""


class Mark(Protocol):
    """The copies that had been added to a queue when it was made."""

    def wait(self) -> None:
        """Blocks until all of them have landed.

        Raises:
            DeviceFailure: one of them has not.
        """
        ...


class CopyQueue(Protocol):
    """Copies in the order in which they are added. Any thread may add; all share the order."""

    def add(self, copies: Callable[[], object]) -> None:
        """Runs `copies`, or lets the device run what it enqueues, now or later: whatever it
        touches stays as it is, and alive, until a later mark has been waited for.

        Raises:
            DeviceFailure: it could not be enqueued.
        """
        ...

    def mark(self) -> Mark: ...


class DeviceScratch(Protocol):
    """Pages on the device that hold nothing of anybody. Freed with the object."""

    @property
    def pool(self) -> PagePool: ...


class Device(Protocol):
    """One device, for any number of pools on it. Everything but `queue` may raise TransferError:
    the memory is not there, or not the device's."""

    def use(self) -> None:
        """Makes the calling thread one whose calls are for this device, also those that name none,
        as waiting for a mark or asking for pinned memory. Every thread that has to do with the
        device calls it first: such a call would else make a context on GPU 0, some hundred MiB."""
        ...

    def view(self, pool: PagePool) -> Tensor:
        """uint8 [num_pages, page_bytes], the pool's own bytes. Keeps nothing alive."""
        ...

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of the device for copies, and for nothing else."""
        ...

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and into by itself."""
        ...

    def scratch(self, page_bytes: int) -> DeviceScratch: ...

    def queue(self, direction: Direction) -> CopyQueue:
        """The same one for everybody who asks for that direction."""
        ...


class CudaDevice:
    """A CUDA device of this process.

    It has one stream for each direction and makes no others: torch hands streams out of a pool of
    32 in turn, so that one made for every connection would sooner or later be the forwards' own.
    They are of the high priority, whose pool the forwards do not use.
    """

    def __init__(self, name: str) -> None:
        """Raises TransferError where there is no such device. `name` is "cuda" or "cuda:N"."""
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
            tensor = torch.as_tensor(_CudaArray(pool.base, shape), device=self._device)
        if tensor.data_ptr() != pool.base:  # copied, because it is another device's
            raise TransferError(f"no memory of {self._device}")
        return tensor

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        # Of either stream: torch gives freed memory to that stream's next user at once, and who
        # asked for it has waited for its own marks by then.
        with _failures(f"no memory on {self._device}"), self._queues["to device"].current():
            return torch.empty(shape, dtype=dtype, device=self._device)

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with _failures("no pinned memory"):
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def scratch(self, page_bytes: int) -> "_CudaScratch":
        memory = self.empty(scratch_pages(page_bytes), page_bytes, dtype=torch.uint8)
        queue = self._queues["to device"]
        queue.add(memory.zero_)
        queue.mark().wait()
        return _CudaScratch(memory)

    def queue(self, direction: Direction) -> "_CudaQueue":
        return self._queues[direction]

    def read(self, address: int, num_bytes: int) -> bytes:
        """Of any memory that this device reaches. Blocks, in a thread that uses the device."""
        return cuda_driver.read(address, num_bytes, self._queues["to host"].stream)

    def write(self, pool: PagePool, values: Tensor) -> None:
        """The first bytes of a pool. `values` is uint8, in host memory. Blocks."""
        queue = self._queues["to device"]
        queue.add(partial(self.view(pool).view(-1)[: len(values)].copy_, values))
        queue.mark().wait()

    def synchronise(self) -> None:
        """Blocks until the device has done all that this process has asked of it so far, on
        whichever stream, also on streams that exist no more.

        Raises:
            DeviceFailure: it cannot.
        """
        with _failures(f"{self._device} has failed"):
            torch.cuda.synchronize(self._device)


@cache
def cuda_device(name: str) -> CudaDevice:
    """The device of that name. Raises TransferError where there is none."""
    return CudaDevice(name)


class _CudaQueue:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @property
    def stream(self) -> int:
        """The driver's handle of it."""
        handle: int = self._stream.cuda_stream
        return handle

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):  # and its device, in this thread
            yield

    def add(self, copies: Callable[[], object]) -> None:
        with _failures("a copy could not be enqueued"), self.current():
            copies()

    def mark(self) -> "_CudaMark":
        with _failures("a copy could not be marked"):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits sleeps
            event.record(self._stream)
        return _CudaMark(event)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        with _failures("a copy has failed"):
            self._event.synchronize()


class _CudaScratch:
    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        num_pages, page_bytes = memory.shape
        self.pool = PagePool(memory.data_ptr(), page_bytes, num_pages, str(memory.device))


class _CudaArray:
    """Memory at an address, as torch takes it from others without a copy."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": shape,
            "strides": None,
            "data": (address, False),
        }


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """torch raises RuntimeError and its children for everything that a device refuses."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFailure(f"{what}: {str(error).partition(chr(10))[0]}") from None
