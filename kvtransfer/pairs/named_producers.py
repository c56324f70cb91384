"""The producers that this node pairs with: those on the router's list, and recently named ones up
to a limit. Knows addresses and a dialer.
"""

import time
from collections.abc import Callable, Iterable

MAX_PRODUCERS = 64
REMEMBERED_S = 600.0  # since a producer was last named


class NamedProducers:
    """The addresses to dial. Event loop only.

    Args:
        own_address: this node's, which is not dialled.
        dial: called with all addresses whenever they change.
    """

    def __init__(
        self,
        own_address: str,
        dial: Callable[[frozenset[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own_address = own_address
        self._dial = dial
        self._clock = clock
        self._listed: frozenset[str] = frozenset()
        self._named: dict[str, float] = {}  # by address: when it was named; latest last
        self._dialled: frozenset[str] = frozenset()

    def listed(self, addresses: frozenset[str]) -> None:
        """Replace the router's list."""
        self._listed = addresses
        self._dial_wanted()

    def name(self, addresses: Iterable[str]) -> None:
        """Record that these producers may have something to read."""
        now = self._clock()
        for address in addresses:
            if address != self._own_address:
                self._named.pop(address, None)
                self._named[address] = now
        self._dial_wanted()

    def _dial_wanted(self) -> None:
        now, oldest = self._clock(), list(self._named)
        while oldest and self._is_too_many(oldest[0], now):
            del self._named[oldest.pop(0)]
        wanted = self._listed | frozenset(self._named)
        if wanted != self._dialled:
            self._dialled = wanted
            self._dial(wanted)

    def _is_too_many(self, oldest: str, now: float) -> bool:
        return len(self._named) > MAX_PRODUCERS or now - self._named[oldest] > REMEMBERED_S
