"""Limits of connections, shared between client addresses.

If an address has used its share, or no place is free, a new connection replaces the connection that
has been idle longest: one of the same address, or of the address with the most connections. If none
of those is idle, the new connection is rejected.
"""

from collections.abc import Callable

from api.auth.client import network_of
from api.auth.shares import FairShares

Leave = Callable[[], None]


class ConnectionSlot:
    """The place of one connection.

    Call `leave` when the connection ends. Further calls do nothing.
    """

    def __init__(self, room: "ConnectionLimit", network: str, turn_out: Leave) -> None:
        self.turn_out = turn_out
        self._room = room
        self._network = network
        self._left = False

    def idle(self) -> None:
        """Mark the connection as idle, so that it may be closed in favour of a new one."""
        if not self._left:
            self._room.idle(self._network, self)

    def busy(self) -> None:
        self._room.busy(self._network, self)

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._room.busy(self._network, self)
            self._room.give_back(self._network)


class ConnectionLimit:
    """The places for connections. For one event loop."""

    def __init__(self, places: int) -> None:
        self._shares = FairShares(places)
        self._idle: dict[
            str, dict[ConnectionSlot, None]
        ] = {}  # longest idle first, never an empty dict

    def enter(self, host: str, turn_out: Leave) -> ConnectionSlot | None:
        """Return a place for a new connection, or None if there is none.

        Args:
            host: address of the client.
            turn_out: ends the connection. Called at most once, while the connection is idle.
        """
        network = network_of(host)
        if not self._shares.may_take(network, 1.0):
            full = self._shares.num_held >= self._shares.places
            if not self._turn_out_of(self._shares.largest() if full else network):
                return None
        self._shares.take(network)
        return ConnectionSlot(self, network, turn_out)

    def _turn_out_of(self, network: str) -> bool:
        place = next(iter(self._idle.get(network, ())), None)
        if place is None:
            return False
        place.leave()
        place.turn_out()
        return True

    # Called by places -----------------------------------------------------------------------------

    def idle(self, network: str, place: ConnectionSlot) -> None:
        self._idle.setdefault(network, {})[place] = None

    def busy(self, network: str, place: ConnectionSlot) -> None:
        idle = self._idle.get(network, {})
        idle.pop(place, None)
        if not idle:
            self._idle.pop(network, None)

    def give_back(self, network: str) -> None:
        self._shares.give_back(network)
