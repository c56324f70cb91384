"""Streams: run forwards in order, concurrent with the engine thread.

On a CPU, a stream is one thread, and torch releases the GIL while it computes. Scheduling therefore
overlaps with the forward in the same way with and without a GPU.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch

from common.errors import EngineFault

MAX_QUEUED = 8  # the engine keeps two steps in flight, so more is an internal error
DEADLINE_S = 600.0  # longest wait for an event in seconds, above the time of any healthy step

Made = TypeVar("Made")


class StreamEvent(Protocol):
    @property
    def is_done(self) -> bool:
        """Return whether the work has ended, without waiting."""
        ...

    def wait(self) -> None:
        """Wait until the work is done.

        Raises:
            Exception: the error that the work raised.
            EngineFault: the work was not done within DEADLINE_S.
        """
        ...


class DeviceStream(Protocol):
    def submit(self, work: Callable[[], None]) -> StreamEvent:
        """Run `work` after everything submitted before. The event also covers work that `work`
        enqueues on the device."""
        ...

    def close(self) -> None:
        """Wait for submitted work. Nothing may be submitted afterwards."""
        ...


class WorkerEvent:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        try:
            self._future.result(DEADLINE_S)
        except TimeoutError as error:
            raise EngineFault(f"a forward took longer than {DEADLINE_S:.0f} s") from error


class WorkerStream:
    """A stream with one daemon thread, which runs closures in order (FIFO). Only one thread may
    submit."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="forward-stream", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> WorkerEvent:
        if self._queue.qsize() >= MAX_QUEUED:
            raise EngineFault(f"{MAX_QUEUED} forwards are queued already")
        future: Future[None] = Future()
        self._queue.put((future, work))
        return WorkerEvent(future)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        torch.get_num_threads()  # OpenMP counts by thread: inherit the process's count
        while (item := self._queue.get()) is not None:
            future, work = item
            del item  # do not keep a finished step alive while waiting for the next
            try:
                work()
            except BaseException as error:  # noqa: BLE001  raised again in wait()
                future.set_exception(error)
            else:
                future.set_result(None)
            del future, work


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """A CUDA stream. The calling thread enqueues `work` and never waits for it.

    Waits have no deadline here, because the driver ends them when the device fails.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Makes earlier work (weights, pools) visible to all work on this stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def submit(self, work: Callable[[], None]) -> CudaEvent:
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return CudaEvent(event)

    def close(self) -> None:
        self._stream.synchronize()


def made_on(stream: DeviceStream, make: Callable[[], Made]) -> Made:
    """Return the result of `make`, run on the stream.

    Operations that fill memory in `make` are thereby ordered before all work submitted later. The
    caller's own stream would not ensure that.
    """
    made: list[Made] = []
    stream.submit(lambda: made.append(make())).wait()
    return made[0]


def open_stream(device: torch.device) -> DeviceStream:
    return WorkerStream() if device.type == "cpu" else CudaStream(device)
