"""Which adapter is in which slot of the device. A slot is its adapter's as long as one of its
requests has it; after that it is the next one's who needs it, the longest unused first."""

from common.requests.adapter import AdapterId


class DeviceSlots:
    """Engine thread only."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[AdapterId, int] = {}
        self._users: dict[AdapterId, int] = {}  # of those that are in use
        self._idle: dict[AdapterId, None] = {}  # the others, the longest unused first

    @property
    def num_used(self) -> int:
        """Slots that requests have."""
        return len(self._users)

    def slot_of(self, adapter: AdapterId) -> int:
        """Of one that is in use."""
        return self._slots[adapter]

    def take(self, adapter: AdapterId) -> tuple[int, bool] | None:
        """A slot for one more request: which, and whether the adapter is yet to be put there.
        None: all are in use."""
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
        """One request less."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._idle[adapter] = None
