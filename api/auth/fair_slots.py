"""Slots for live requests, shared out fairly: who cannot have one waits a little, in its own line.

A slot that comes free goes to the client that has the fewest for its weight, of those that wait
and may take one, and there to the most urgent. Lines are short: what waits is held in memory. Their
places are shared as the slots are, so that one client's requests cannot fill them either; of those
the least urgent leaves its place to one that is more urgent.
"""

import asyncio
from bisect import insort
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeAlias

from api.auth.client import Client
from api.auth.shares import Shares
from common.errors import Overloaded, ServingError

_WAITING_PER_SLOT = 1 / 4
_WAITING_AT_LEAST = 8


# Of one that waits: None is a slot, an error that there will be none.
_Turn: TypeAlias = "asyncio.Future[ServingError | None]"


class _Waiter(NamedTuple):
    """The least goes first."""

    lateness: int  # the less urgent, the more
    number: int  # of all that ever waited
    turn: _Turn


class FairSlots:
    """For one event loop."""

    def __init__(
        self,
        num_slots: int,
        *,
        longest_wait_s: float,
        max_waiting: int | None = None,
        what: str = "requests are live",
    ) -> None:
        """
        Args:
            max_waiting: None: a quarter of the slots.
            what: holds slots, for errors.
        """
        if max_waiting is None:
            max_waiting = max(int(num_slots * _WAITING_PER_SLOT), _WAITING_AT_LEAST)
        self._slots = Shares(num_slots)
        self._places = Shares(max_waiting)
        self._longest_wait_s = longest_wait_s
        self._what = what
        self._lines: dict[str, _Line] = {}  # none is empty
        self._turns = count()
        self._numbers = count()

    @property
    def num_taken(self) -> int:
        return self._slots.num_held

    @property
    def num_waiting(self) -> int:
        return self._places.num_held

    def num_of(self, client: Client) -> int:
        """Slots that it has or waits for."""
        return self._slots.held(client.name) + self._places.held(client.name)

    async def take(self, client: Client, priority: int = 0) -> None:
        """Returns with a slot, which `give_back` must follow.

        Raises:
            Overloaded: at once if the client's line is full of what is as urgent, else after the
                longest wait, or for one that is more urgent.
            ServingError: what `close` says.
        """
        if client.name not in self._lines and self._slots.may_take(client.name, client.weight):
            self._slots.take(client.name)
            return
        if not (self._longest_wait_s and self._has_place(client, priority)):
            raise self._overloaded(client)
        await self._wait(client, priority)

    def give_back(self, client: Client) -> None:
        self._slots.give_back(client.name)
        self._serve()

    def close(self, because: ServingError) -> None:
        """Ends every wait."""
        for line in list(self._lines.values()):
            for waiter in list(line.waiting):
                self._leave(line.name, waiter)
                waiter.turn.set_result(because)

    def _has_place(self, client: Client, priority: int) -> bool:
        """Whether it may wait, once one that is less urgent waits no more."""
        if self._places.may_take(client.name, client.weight):
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
                self.give_back(client)
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
        self._places.take(client.name)

    def _leave(self, name: str, waiter: _Waiter) -> None:
        line = self._lines[name]
        line.waiting.remove(waiter)
        self._places.give_back(name)
        if not line.waiting:
            del self._lines[name]

    def _serve(self) -> None:
        """Gives free slots to those that wait."""
        while able := [
            line for line in self._lines.values() if self._slots.may_take(line.name, line.weight)
        ]:
            line = min(able, key=self._urgency)
            line.last = next(self._turns)
            self._slots.take(line.name)
            self._places.give_back(line.name)
            line.waiting.pop(0).turn.set_result(None)
            if not line.waiting:
                del self._lines[line.name]

    def _urgency(self, line: "_Line") -> tuple[float, int]:
        """Among those with equal shares it goes round."""
        return self._slots.held(line.name) / line.weight, line.last

    def _overloaded(self, client: Client) -> Overloaded:
        return Overloaded(
            f"{self.num_taken} {self._what}, {self._slots.held(client.name)} of them of this "
            "client: no more can be taken now"
        )


@dataclass(slots=True, eq=False)
class _Line:
    """One client's requests that wait; `last` says after whom it was served last."""

    name: str
    weight: float
    last: int
    waiting: list[_Waiter] = field(default_factory=list)
