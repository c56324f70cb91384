"""Whose text is tokenised next: the shortest that waits, but no text waits for ever.

Each second of waiting makes a text as good as one that is shorter by so many bytes. All texts gain
alike, so their order never changes while they wait. Knows no tokenizer.
"""

import asyncio
import heapq
from itertools import count

from common.errors import Overloaded

_GAINED_BYTES_PER_S = 256 << 10

_Waiting = tuple[float, int, asyncio.Future[None]]


class ByLength:
    """Turns for as many texts at once as there are places. For one event loop."""

    def __init__(self, places: int, *, max_waiting_bytes: int) -> None:
        self._free = places
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._waiting: list[_Waiting] = []  # a heap
        self._numbers = count()

    async def take(self, num_bytes: int, arrived: float) -> None:
        """Waits for a place, to be given back. Being cancelled takes the text out of the queue.

        Args:
            num_bytes: of the text.
            arrived: when the text came, in seconds of any clock that all callers share.
        Raises:
            Overloaded: too much text waits already. At once.
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
        """Whoever is next has the place."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():  # nor cancelled a moment ago
                turn.set_result(None)
                return
        self._free += 1

    def _leave(self, waiting: _Waiting) -> None:
        *_, turn = waiting
        if not turn.cancelled():
            self.give_back()  # it had its turn in the moment in which it was cancelled
        elif waiting in self._waiting:
            self._waiting.remove(waiting)
            heapq.heapify(self._waiting)
