"""Shares of limited places, so that a new client always finds one or gets one soon.

A client may take another place while it holds fewer than 7 times its weight of the free ones
(dynamic thresholds: Choudhury and Hahne 1998, for packets in a switch). The last eighth of all
places always stays free. A weight of w counts as w clients that act as one. For weights of 1 and N
places:
- One client alone gets 7/8 of N. As places are returned, two greedy clients end up with 7/15 each,
  and k clients with 7 / (1 + 7k) each. A client that takes less leaves the rest to the others.
- Then N / (1 + 7k) places are free, so a client without places gets one immediately. Until places
  are returned, each further greedy client takes 7/8 of the remainder. It takes log8(N) of them in a
  row to leave nothing, four for a thousand places. The next returned place is the newcomer's.
"""

_PER_FREE_PLACE = 7
_LEFT_FREE = 8  # fraction 1/8


class FairShares:
    def __init__(self, places: int) -> None:
        self.places = places
        self._held: dict[str, int] = {}
        self.num_held = 0
        self._most = places - places // _LEFT_FREE

    def held(self, name: str) -> int:
        return self._held.get(name, 0)

    def largest(self) -> str:
        """Return the client that holds the most. Requires at least one holder."""
        return max(self._held, key=self._held.__getitem__)

    def may_take(self, name: str, weight: float) -> bool:
        held = self.held(name)
        free = self.places - self.num_held
        return held < min(_PER_FREE_PLACE * weight * free, self._most)

    def take(self, name: str) -> None:
        """Take a place. Requires `may_take`."""
        self._held[name] = self.held(name) + 1
        self.num_held += 1

    def give_back(self, name: str) -> None:
        self.num_held -= 1
        left = self._held[name] - 1
        if left:
            self._held[name] = left
        else:
            del self._held[name]
