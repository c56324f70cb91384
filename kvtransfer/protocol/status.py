"""The states of a hand-off, the same on both ends.

BOOTSTRAPPING      opened, not granted
WAITING_FOR_INPUT  granted, nothing published
TRANSFERRING       pages published, being read
SUCCESS | FAILED   ended

BOOTSTRAPPING -> WAITING_FOR_INPUT -> TRANSFERRING -> SUCCESS;  all but SUCCESS -> FAILED
"""

from enum import Enum

from common.errors import EngineFault


class HandoffStatus(Enum):
    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting_for_input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


_NEXT = {
    HandoffStatus.BOOTSTRAPPING: {HandoffStatus.WAITING_FOR_INPUT, HandoffStatus.FAILED},
    HandoffStatus.WAITING_FOR_INPUT: {HandoffStatus.TRANSFERRING, HandoffStatus.FAILED},
    HandoffStatus.TRANSFERRING: {
        HandoffStatus.TRANSFERRING,
        HandoffStatus.SUCCESS,
        HandoffStatus.FAILED,
    },
    HandoffStatus.SUCCESS: set(),
    HandoffStatus.FAILED: set(),
}


def advance(old: HandoffStatus, new: HandoffStatus) -> HandoffStatus:
    """Return `new`. Raises EngineFault if the transition from `old` is invalid."""
    if new not in _NEXT[old]:
        raise EngineFault(f"a hand-off cannot go from {old.name} to {new.name}")
    return new
