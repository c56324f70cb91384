"""Assignment of adapters to device slots.

An adapter keeps its slot while a request uses it. After that the slot may be reassigned, the least
recently used first.
"""

from common.requests.adapter import AdapterId


class AdapterSlots:
    """The device slots. Engine thread only."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[AdapterId, int] = {}
        self._users: dict[AdapterId, int] = {}  # requests per adapter in use
        self._idle: dict[AdapterId, None] = {}  # adapters not in use, the least recently used first

    @property
    def num_used(self) -> int:
        """Number of slots that requests use."""
        return len(self._users)

    def slot_of(self, adapter: AdapterId) -> int:
        """Return the slot of an adapter in use."""
        return self._slots[adapter]

    def take(self, adapter: AdapterId) -> tuple[int, bool] | None:
        """Assign a slot for one more request. Return the slot, and whether the adapter must still
        be copied into it. None if all slots are in use."""
        if adapter in self._users:
            self._users[adapter] += 1
            return self._slots[adapter], False
        fresh = adapter not in self._idle
        if fresh:
            if not self._free and not self._idle:
                return None
            if not self._free:
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                self._free.append(self._slots.pop(oldest))
            self._slots[adapter] = self._free.pop()
        else:
            del self._idle[adapter]
        self._users[adapter] = 1
        return self._slots[adapter], fresh

    def drop(self, adapter: AdapterId) -> None:
        """Release one request's use of the adapter's slot."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._idle[adapter] = None
