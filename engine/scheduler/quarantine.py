"""Running requests that share no forward with others for a while.

See common/requests/quarantine.py. Slots and tokens only. It knows how far each has to get, not why.
"""

import numpy as np
from numpy.typing import NDArray

from engine.batch.request import Request
from engine.batch.table import RequestTable


class Quarantine:
    """Engine thread only. Nearly always empty."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._until: dict[int, int] = {}  # slot: tokens it must have to be let out

    def __bool__(self) -> bool:
        return bool(self._until)

    def take(self, slot: int, request: Request) -> None:
        """A request begins to run; it is kept apart if it is suspect."""
        if request.suspect:
            self._until[slot] = request.alone_until

    def forget(self, slot: int) -> None:
        """It has ended, or is to be computed anew. Harmless where the slot is not here."""
        self._until.pop(slot, None)

    def let_out(self) -> None:
        """Those that have got far enough, by the tokens that are known."""
        known = self._table.known
        self._until = {slot: until for slot, until in self._until.items() if known[slot] < until}

    def inside(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        return slots[np.isin(slots, list(self._until))]

    def outside(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """The very same array while nobody is inside."""
        return slots[~np.isin(slots, list(self._until))] if self._until else slots
