"""Room for connections, shared among the addresses that they come from.

An address that has its share, and one that comes when nothing is free, gets the place of the
connection that has been idle longest: of its own, or of the address that has most. Only where none
is idle there is no room.
"""

from collections.abc import Callable

from api.auth.client import network_of
from api.auth.shares import Shares

Leave = Callable[[], None]


class Place:
    """One connection's. `leave` once it is over, and whenever it likes after that."""

    def __init__(self, room: "Room", network: str, turn_out: Leave) -> None:
        self.turn_out = turn_out
        self._room = room
        self._network = network
        self._left = False

    def idle(self) -> None:
        """From now on it may be turned out."""
        if not self._left:
            self._room.idle(self._network, self)

    def busy(self) -> None:
        self._room.busy(self._network, self)

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._room.busy(self._network, self)
            self._room.give_back(self._network)


class Room:
    """For one event loop."""

    def __init__(self, places: int) -> None:
        self._shares = Shares(places)
        self._idle: dict[str, dict[Place, None]] = {}  # the longest idle first; none is empty

    def enter(self, host: str, turn_out: Leave) -> Place | None:
        """
        Args:
            host: where the connection comes from.
            turn_out: ends it; called at most once, while it is idle.
        Returns:
            None: there is no room.
        """
        network = network_of(host)
        if not self._shares.may_take(network, 1.0):
            full = self._shares.num_held >= self._shares.places
            if not self._turn_out_of(self._shares.largest() if full else network):
                return None
        self._shares.take(network)
        return Place(self, network, turn_out)

    def _turn_out_of(self, network: str) -> bool:
        place = next(iter(self._idle.get(network, ())), None)
        if place is None:
            return False
        place.leave()
        place.turn_out()
        return True

    # What places call -----------------------------------------------------------------------------

    def idle(self, network: str, place: Place) -> None:
        self._idle.setdefault(network, {})[place] = None

    def busy(self, network: str, place: Place) -> None:
        idle = self._idle.get(network, {})
        idle.pop(place, None)
        if not idle:
            self._idle.pop(network, None)

    def give_back(self, network: str) -> None:
        self._shares.give_back(network)
