"""Fair sharing of slots for requests and connections between clients.

A free slot goes to the waiting client with the fewest slots for its weight, and within the client
to the request with the highest priority. Queues are short, because waiting requests use memory.
Places in queues are shared like slots, so one client cannot fill them. In a full queue of one
client, a request with a higher priority replaces the one with the lowest.
"""

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeAlias

from api.auth.client import Client, network_of
from common.errors import Overloaded, ServingError

_PER_FREE_PLACE = 7
_LEFT_FREE = 8  # fraction 1/8


# Shares of a limited number of places, so that a new client always gets one soon.
#
# A client may take another place while it holds fewer than 7 times its weight of the free places
# (dynamic thresholds: Choudhury and Hahne 1998, for packets in a switch). The last eighth of all
# places stays free. For N places and clients of weight 1: One client alone gets 7/8 of N. Of k
# greedy clients, each gets 7 / (1 + 7k) of N once places have been returned. Then N / (1 + 7k)
# places are free for clients without a place. Until places are returned, each further greedy client
# takes 7/8 of the free places. So log8(N) of them in a row leave none: four for a thousand places.
# The next returned place then goes to a new client.
class FairShares:
    def __init__(self, places: int) -> None:
        self.places = places
        self._held: dict[str, int] = {}
        self.num_held = 0
        self._most = places - places // _LEFT_FREE

    def held(self, name: str) -> int:
        return self._held.get(name, 0)

    def largest(self) -> str:
        """Return the client that holds the most places. There must be one."""
        return max(self._held, key=self._held.__getitem__)

    def may_acquire(self, name: str, weight: float) -> bool:
        held = self.held(name)
        free = self.places - self.num_held
        return held < min(_PER_FREE_PLACE * weight * free, self._most)

    def acquire(self, name: str) -> None:
        """Acquire a place. Requires `may_acquire`."""
        self._held[name] = self.held(name) + 1
        self.num_held += 1

    def release(self, name: str) -> None:
        self.num_held -= 1
        left = self._held[name] - 1
        if left:
            self._held[name] = left
        else:
            del self._held[name]


_WAITING_PER_SLOT = 1 / 4
_WAITING_AT_LEAST = 8


# Result of a wait: None grants a slot, an error ends the wait without one.
_Turn: TypeAlias = "asyncio.Future[ServingError | None]"


class _Waiter(NamedTuple):
    """A queued request. The smallest one is served first."""

    lateness: int  # higher for lower priorities
    number: int  # sequence number over all waiters
    turn: _Turn


class FairShareLimiter:
    """Slots shared fairly between clients, with a short queue for each. For one event loop."""

    def __init__(
        self,
        num_slots: int,
        *,
        longest_wait_s: float,
        max_waiting: int | None = None,  # None: a quarter of the slots
        what: str = "requests are live",  # the slot holders, in error messages
    ) -> None:
        if max_waiting is None:
            max_waiting = max(int(num_slots * _WAITING_PER_SLOT), _WAITING_AT_LEAST)
        self._slots = FairShares(num_slots)
        self._places = FairShares(max_waiting)
        self._longest_wait_s = longest_wait_s
        self._what = what
        self._lines: dict[str, _Line] = {}  # never an empty queue
        self._turns = count()
        self._numbers = count()

    @property
    def num_taken(self) -> int:
        return self._slots.num_held

    @property
    def num_waiting(self) -> int:
        return self._places.num_held

    def num_of(self, client: Client) -> int:
        """Return the number of slots that a client has or waits for."""
        return self._slots.held(client.name) + self._places.held(client.name)

    async def acquire(self, client: Client, priority: int = 0) -> None:
        """Wait for a slot. Each call that returns must be followed by `release`.

        Raises:
            Overloaded: immediately, if the client's queue is full of requests of at least this
                priority. Later, after the longest wait or when a request with a higher priority
                takes the place.
            ServingError: the error passed to `close`.
        """
        if client.name not in self._lines and self._slots.may_acquire(client.name, client.weight):
            self._slots.acquire(client.name)
            return
        if not (self._longest_wait_s and self._has_place(client, priority)):
            raise self._overloaded(client)
        await self._wait(client, priority)

    def release(self, client: Client) -> None:
        self._slots.release(client.name)
        self._serve()

    def close(self, because: ServingError) -> None:
        """End every wait with an error."""
        for line in list(self._lines.values()):
            for waiter in list(line.waiting):
                self._leave(line.name, waiter)
                waiter.turn.set_result(because)

    def _has_place(self, client: Client, priority: int) -> bool:
        """Return whether a request may wait. May reject the client's request of lower priority."""
        if self._places.may_acquire(client.name, client.weight):
            return True
        line = self._lines.get(client.name)
        if line is None or line.waiting[-1].lateness <= -priority:
            return False
        last = line.waiting[-1]
        self._leave(line.name, last)
        last.turn.set_result(self._overloaded(client))
        return True

    async def _wait(self, client: Client, priority: int) -> None:
        turn: _Turn = asyncio.get_running_loop().create_future()
        waiter = _Waiter(-priority, next(self._numbers), turn)
        self._join(client, waiter)
        try:
            await asyncio.wait((turn,), timeout=self._longest_wait_s)
        except asyncio.CancelledError:
            if turn.done() and turn.result() is None:
                self.release(client)
            raise
        finally:
            if not turn.done():
                self._leave(client.name, waiter)
        refusal = turn.result() if turn.done() else self._overloaded(client)
        if refusal is not None:
            raise refusal

    def _join(self, client: Client, waiter: _Waiter) -> None:
        line = self._lines.get(client.name)
        if line is None:
            line = self._lines[client.name] = _Line(client.name, client.weight, next(self._turns))
        insort(line.waiting, waiter)
        self._places.acquire(client.name)

    def _leave(self, name: str, waiter: _Waiter) -> None:
        line = self._lines[name]
        line.waiting.remove(waiter)
        self._places.release(name)
        if not line.waiting:
            del self._lines[name]

    def _serve(self) -> None:
        """Give free slots to waiting requests."""
        while able := [
            line for line in self._lines.values() if self._slots.may_acquire(line.name, line.weight)
        ]:
            line = min(able, key=self._urgency)
            line.last = next(self._turns)
            self._slots.acquire(line.name)
            self._places.release(line.name)
            line.waiting.pop(0).turn.set_result(None)
            if not line.waiting:
                del self._lines[line.name]

    def _urgency(self, line: "_Line") -> tuple[float, int]:
        """Return the sort key of a queue. Clients with equal shares take turns."""
        return self._slots.held(line.name) / line.weight, line.last

    def _overloaded(self, client: Client) -> Overloaded:
        return Overloaded(
            f"{self.num_taken} {self._what}, {self._slots.held(client.name)} of them of this "
            "client: no more can be accepted now"
        )


@dataclass(slots=True, eq=False)
class _Line:
    """One client's queue. `last` is the turn number of its last slot."""

    name: str
    weight: float
    last: int
    waiting: list[_Waiter] = field(default_factory=list)


class ConnectionSlot:
    """The place of one connection in a ConnectionLimit.

    Call `leave` when the connection ends. Further calls do nothing.
    """

    def __init__(self, room: "ConnectionLimit", network: str, close: Callable[[], None]) -> None:
        self.close = close
        self._room = room
        self._network = network
        self._left = False

    def idle(self) -> None:
        """Mark the connection as idle, so that it may be closed in favour of a new one."""
        if not self._left:
            self._room.idle.setdefault(self._network, {})[self] = None

    def busy(self) -> None:
        idle = self._room.idle.get(self._network, {})
        idle.pop(self, None)
        if not idle:
            self._room.idle.pop(self._network, None)

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self.busy()
            self._room.shares.release(self._network)


class ConnectionLimit:
    """Places for connections, shared fairly between client addresses. For one event loop.

    If an address has used its share, or no place is free, a new connection replaces the longest
    idle connection: of the same address, or of the address with the most connections. Without an
    idle connection there, the new connection is rejected.

    Attributes:
        idle: idle connections by network, the longest idle first. Never an empty dict.
    """

    def __init__(self, places: int) -> None:
        self.shares = FairShares(places)
        self.idle: dict[str, dict[ConnectionSlot, None]] = {}

    def enter(self, host: str, close: Callable[[], None]) -> ConnectionSlot | None:
        """Return a place for a new connection, or None if no place is free.

        Args:
            host: address of the client.
            close: ends the connection. Called at most once, while the connection is idle.
        """
        network = network_of(host)
        if not self.shares.may_acquire(network, 1.0):
            full = self.shares.num_held >= self.shares.places
            longest_idle = self.idle.get(self.shares.largest() if full else network)
            if not longest_idle:
                return None
            place = next(iter(longest_idle))
            place.leave()
            place.close()
        self.shares.acquire(network)
        return ConnectionSlot(self, network, close)
