"""A fake CudaDevice: a thread and host memory. Its copies run later than requested.

Code that does not wait, or that modifies memory that a copy still needs, gets wrong bytes. A test
may hold copies, count them, or make them fail. Calls from threads that did not select the device
are recorded.
"""

import ctypes
import math
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_memory import DeviceFailure, Direction
from kvtransfer.backends.scratch import scratch_pages

WAIT_S = 60.0


class TwinMark:
    def __init__(self, queue: "TwinQueue", number: int) -> None:
        self._queue = queue
        self._number = number

    def wait(self) -> None:
        self._queue.users.check()
        self._queue.wait_until_done(self._number)


class Users:
    """The threads that have selected the device."""

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self.strays: list[str] = []  # names of threads that would have used another device

    def add(self) -> None:
        self._threads.add(threading.get_ident())

    def check(self) -> None:
        if threading.get_ident() not in self._threads:
            self.strays.append(threading.current_thread().name)


class TwinQueue:
    """Runs added work on a separate thread, each item with a delay."""

    def __init__(self, delay_s: float, users: Users) -> None:
        self.users = users
        self._delay_s = delay_s
        self._changed = threading.Condition()
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._held_from: float = math.inf  # number of copies after which all others are held
        self._failure = ""
        self._num_done = 0
        self.num_added = 0
        threading.Thread(target=self._run, name="device-twin", daemon=True).start()

    def add(self, copies: Callable[[], object]) -> None:
        self.users.check()
        with self._changed:
            self.num_added += 1
        self._work.put(copies)

    def mark(self) -> TwinMark:
        self.users.check()
        return TwinMark(self, self.num_added)

    def hold(self, after: int = 0) -> None:
        """Hold all copies except the next `after` ones until `release`."""
        with self._changed:
            self._held_from = self._num_done + after

    def release(self) -> None:
        with self._changed:
            self._held_from = math.inf
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """From now on, copies fail and all waiting callers get an error."""
        with self._changed:
            self._failure = reason
            self._held_from = math.inf
            self._changed.notify_all()

    def end(self) -> None:
        """Stop after all work added so far."""
        self._work.put(None)

    def wait_until_done(self, number: int) -> None:
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._num_done >= number or bool(self._failure), WAIT_S
            )
            if self._failure:
                raise DeviceFailure(self._failure)
            assert done, "held for ever"

    def _run(self) -> None:
        while (copies := self._work.get()) is not None:
            threading.Event().wait(self._delay_s)
            with self._changed:
                self._changed.wait_for(lambda: self._num_done < self._held_from)
                if self._failure:
                    continue
            copies()
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()


class DeviceTwin:
    """A Device whose pools are in host memory."""

    def __init__(self, delay_s: float = 0.001) -> None:
        self.users = Users()
        self.queues: dict[Direction, TwinQueue] = {
            "to host": TwinQueue(delay_s, self.users),
            "to device": TwinQueue(delay_s, self.users),
        }

    def use(self) -> None:
        self.users.add()

    def end(self) -> None:
        for queue in self.queues.values():
            queue.end()

    def view(self, pool: PagePool) -> Tensor:
        memory = (ctypes.c_uint8 * (pool.num_pages * pool.page_bytes)).from_address(pool.base)
        return torch.frombuffer(memory, dtype=torch.uint8).view(pool.num_pages, pool.page_bytes)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        self.users.check()
        return torch.empty(shape, dtype=dtype)

    empty_host = empty

    def scratch(self, page_bytes: int) -> Tensor:
        return torch.zeros(scratch_pages(page_bytes), page_bytes, dtype=torch.uint8)

    def queue(self, direction: Direction) -> TwinQueue:
        return self.queues[direction]
