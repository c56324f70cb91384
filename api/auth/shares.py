"""Places that clients share, so that nobody who comes finds all of them taken.

A client may take another place while it holds fewer than 7 times its weight of the free ones
(dynamic thresholds: Choudhury and Hahne 1998, of packets in a switch), and never the last eighth
of all. A weight of w counts as w clients that act as one. For weights of 1, and N places:

- one client alone has 7/8 of N. As places come back, two that want all they can get end up with
  7/15 each, and k with 7 / (1 + 7k): who takes less leaves it to the others.
- N / (1 + 7k) places are free then, so that whoever holds none gets one at once. Until some come
  back each of those that take all they can takes 7/8 of what is left: it takes log8(N) of them in
  a row to leave nothing, four for a thousand. Then a place that comes back is the newcomer's.
"""

_PER_FREE_PLACE = 7
_LEFT_FREE = 8  # one part of so many


class Shares:
    def __init__(self, places: int) -> None:
        self.places = places
        self._held: dict[str, int] = {}
        self.num_held = 0
        self._most = places - places // _LEFT_FREE

    def held(self, name: str) -> int:
        return self._held.get(name, 0)

    def largest(self) -> str:
        """Who holds most, of those who hold any."""
        return max(self._held, key=self._held.__getitem__)

    def may_take(self, name: str, weight: float) -> bool:
        held = self.held(name)
        free = self.places - self.num_held
        return held < min(_PER_FREE_PLACE * weight * free, self._most)

    def take(self, name: str) -> None:
        """Only if it may."""
        self._held[name] = self.held(name) + 1
        self.num_held += 1

    def give_back(self, name: str) -> None:
        self.num_held -= 1
        left = self._held[name] - 1
        if left:
            self._held[name] = left
        else:
            del self._held[name]
