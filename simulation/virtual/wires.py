"""Faults of the network between processes of a simulation."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Protocol

from simulation.node.wires import HEALTHY, Wire

KEEPALIVE_S = 15.0  # until gRPC's pings detect a silent connection, see common/rpc/channels.py
Ends = tuple[str, str]  # names of the sending and the receiving process


class WiredConnection(Protocol):
    """A connection between two processes.

    Attributes:
        ends: names of the client and the server.
    """

    ends: Ends

    def reset(self) -> None:
        """End both sides at once."""
        ...


class Wires:
    """The condition of the network between all processes.

    Attributes:
        connections: that are open, in order.
    """

    def __init__(self) -> None:
        self._faults: list[tuple[Collection[Ends], Wire]] = []
        self.connections: dict[WiredConnection, None] = {}

    def wire(self, sender: str, receiver: str) -> Wire:
        """Return the condition of one direction."""
        if not self._faults:
            return HEALTHY
        ends = (sender, receiver)
        return reduce(or_, (wire for found, wire in self._faults if ends in found), HEALTHY)

    def both(self, one: str, other: str) -> Wire:
        """Return the condition of the worse direction."""
        there, back = self.wire(one, other), self.wire(other, one)
        return Wire(
            max(there.factor, back.factor),
            there.is_cut or back.is_cut,
            there.is_silent or back.is_silent,
        )

    async def fail(self, ends: Collection[Ends], wire: Wire, seconds: float) -> None:
        """Put these directions into a condition for a time."""
        with self._failing(ends, wire):
            if wire.is_cut:
                self._reset(ends)
            elif wire.is_silent and seconds > KEEPALIVE_S:
                await asyncio.sleep(KEEPALIVE_S)
                self._reset(ends)
                seconds -= KEEPALIVE_S
            await asyncio.sleep(seconds)

    @contextmanager
    def _failing(self, ends: Collection[Ends], wire: Wire) -> Iterator[None]:
        fault = (ends, wire)
        self._faults.append(fault)
        try:
            yield
        finally:
            self._faults = [each for each in self._faults if each is not fault]

    def _reset(self, ends: Collection[Ends]) -> None:
        for each in list(self.connections):
            client, server = each.ends
            if (client, server) in ends or (server, client) in ends:
                each.reset()
