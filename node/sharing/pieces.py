"""Which pieces of a file are to be asked for next, where nobody knows how long it is before its
beginning is here. Knows nothing of who is asked, nor of what comes."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Pieces [first, past)."""

    first: int
    past: int


class Pieces:
    """Of one file, numbered from 0 on.

    Attributes:
        num_bytes: of the file, once it is known.
    Args:
        piece_bytes: of each, but for the last one.
        most: pieces, of one window.
    """

    def __init__(self, piece_bytes: int, most: int) -> None:
        self._piece_bytes = piece_bytes
        self._most = most
        self._num_asked = 0  # from the first one on
        self._again: deque[Window] = deque()
        self._again_at = 0.0
        self._past: int | None = None  # its last piece, once that is known
        self.num_bytes: int | None = None

    @property
    def all_asked(self) -> bool:
        """None is left, if what was asked for comes."""
        return self._past is not None and self._num_asked >= self._past and not self._again

    def next(self, now: float) -> Window | None:
        """Who takes it has it come, or gives it back."""
        if self._again:
            return self._again.popleft() if now >= self._again_at else None
        first, past = self._num_asked, self._num_asked + self._most
        if self._past is not None:
            past = min(past, self._past)
        if past <= first:
            return None
        self._num_asked = past
        return Window(first, past)

    def not_asked(self, window: Window) -> None:
        """It is the next one."""
        self._again.appendleft(window)

    def lost(self, window: Window, again_at: float = 0.0) -> None:
        """Nothing lost is asked for again before then."""
        self._again.append(window)
        self._again_at = max(self._again_at, again_at)

    def ends_at(self, num_bytes: int) -> None:
        """So long it is: what was asked for beyond is not asked for again."""
        self.num_bytes, self._past = num_bytes, -(-num_bytes // self._piece_bytes)
        clipped = [Window(each.first, min(each.past, self._past)) for each in self._again]
        self._again = deque(each for each in clipped if each.first < each.past)
