"""Running requests that temporarily share no forward with others.

See common/requests/quarantine.py. This module knows slots and token counts only, not the reason.
"""

import numpy as np
from numpy.typing import NDArray

from engine.batch.request import Request
from engine.batch.table import SlotTable


class QuarantineQueue:
    """The quarantined slots. Engine thread only. Nearly always empty."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._until: dict[int, int] = {}  # slot: number of tokens at which it is released

    def __bool__(self) -> bool:
        return bool(self._until)

    def take(self, slot: int, request: Request) -> None:
        """Quarantine a request that begins to run, if it is suspect."""
        if request.suspect:
            self._until[slot] = request.alone_until

    def forget(self, slot: int) -> None:
        """Remove a request that ended or has to be recomputed. Does nothing if the slot is not
        here."""
        self._until.pop(slot, None)

    def let_out(self) -> None:
        """Release requests that have enough known tokens."""
        known = self._table.known
        self._until = {slot: until for slot, until in self._until.items() if known[slot] < until}

    def inside(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        return slots[np.isin(slots, list(self._until))]

    def outside(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the slots that are not quarantined: the very same array while the quarantine is
        empty."""
        return slots[~np.isin(slots, list(self._until))] if self._until else slots
