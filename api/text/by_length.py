"""A queue of texts to tokenize: the shortest is next, but no text waits forever.

Each second of waiting counts like a fixed number of bytes less. All texts gain alike, so their
order never changes while they wait. Independent of the tokenizer.
"""

import asyncio
import heapq
from itertools import count

from common.errors import Overloaded

_GAINED_BYTES_PER_S = 256 << 10

_Waiting = tuple[float, int, asyncio.Future[None]]


class LengthBatcher:
    """A queue for a limited number of concurrent texts. For one event loop."""

    def __init__(self, places: int, *, max_waiting_bytes: int) -> None:
        self._free = places
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._waiting: list[_Waiting] = []  # a heap
        self._numbers = count()

    async def take(self, num_bytes: int, arrived: float) -> None:
        """Wait for a place, which the caller must give back.

        Cancelling removes the text from the queue.

        Args:
            num_bytes: size of the text.
            arrived: arrival time of the text in seconds, on any clock that all callers share.

        Raises:
            Overloaded: immediately, if too much text waits already.
        """
        if self._free:
            self._free -= 1
            return
        if self._num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise Overloaded(
                f"{self._num_waiting_bytes} bytes of text wait to be tokenised, "
                f"{self._max_waiting_bytes} allowed"
            )
        rank = arrived * _GAINED_BYTES_PER_S + num_bytes
        turn = asyncio.get_running_loop().create_future()
        waiting = (rank, next(self._numbers), turn)
        heapq.heappush(self._waiting, waiting)
        self._num_waiting_bytes += num_bytes
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(waiting)
            raise
        finally:
            self._num_waiting_bytes -= num_bytes

    def give_back(self) -> None:
        """Give the place to the next text."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():  # may have been cancelled just now
                turn.set_result(None)
                return
        self._free += 1

    def _leave(self, waiting: _Waiting) -> None:
        *_, turn = waiting
        if not turn.cancelled():
            self.give_back()  # it got its place at the moment of its cancellation
        elif waiting in self._waiting:
            self._waiting.remove(waiting)
            heapq.heapify(self._waiting)
