"""The next pieces of a file to request, when its length is unknown until its beginning arrives.
Knows neither the nodes that are asked nor the data.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightWindow:
    """Pieces [first, past)."""

    first: int
    past: int


class WeightPieces:
    """The pieces of one file, numbered from 0.

    Attributes:
        num_bytes: of the file, once it is known.
    Args:
        piece_bytes: of each piece except the last one.
        most: pieces of one window.
    """

    def __init__(self, piece_bytes: int, most: int) -> None:
        self._piece_bytes = piece_bytes
        self._most = most
        self._num_asked = 0  # from the first one on
        self._again: deque[WeightWindow] = deque()
        self._again_at = 0.0
        self._past: int | None = None  # its number of pieces, once known
        self.num_bytes: int | None = None

    @property
    def all_asked(self) -> bool:
        """Return whether no piece is left to request, if the requested ones arrive."""
        return self._past is not None and self._num_asked >= self._past and not self._again

    def next(self, now: float) -> WeightWindow | None:
        """Return the next window, or None. The caller requests it, or gives it back with
        `not_asked` or `lost`.
        """
        if self._again:
            return self._again.popleft() if now >= self._again_at else None
        first, past = self._num_asked, self._num_asked + self._most
        if self._past is not None:
            past = min(past, self._past)
        if past <= first:
            return None
        self._num_asked = past
        return WeightWindow(first, past)

    def not_asked(self, window: WeightWindow) -> None:
        """Put a window back, to be the next one."""
        self._again.appendleft(window)

    def lost(self, window: WeightWindow, again_at: float = 0.0) -> None:
        """Put a lost window back. No lost window is requested again before `again_at`."""
        self._again.append(window)
        self._again_at = max(self._again_at, again_at)

    def ends_at(self, num_bytes: int) -> None:
        """Set the length of the file. Lost pieces beyond it are not requested again."""
        self.num_bytes, self._past = num_bytes, -(-num_bytes // self._piece_bytes)
        clipped = [WeightWindow(each.first, min(each.past, self._past)) for each in self._again]
        self._again = deque(each for each in clipped if each.first < each.past)
