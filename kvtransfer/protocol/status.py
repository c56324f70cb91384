"""The states of a hand-off, the same on both ends.

BOOTSTRAPPING      opened, not granted
WAITING_FOR_INPUT  granted, nothing published
TRANSFERRING       pages published, being read
SUCCESS | FAILED   ended

BOOTSTRAPPING -> WAITING_FOR_INPUT -> TRANSFERRING -> SUCCESS;  all but SUCCESS -> FAILED
"""

from enum import Enum

from common.errors import EngineFault


class KVPoll(Enum):
    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting_for_input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


_NEXT = {
    KVPoll.BOOTSTRAPPING: {KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED},
    KVPoll.WAITING_FOR_INPUT: {KVPoll.TRANSFERRING, KVPoll.FAILED},
    KVPoll.TRANSFERRING: {KVPoll.TRANSFERRING, KVPoll.SUCCESS, KVPoll.FAILED},
    KVPoll.SUCCESS: set(),
    KVPoll.FAILED: set(),
}


def advance(old: KVPoll, new: KVPoll) -> KVPoll:
    """Return `new`. Raises EngineFault if the transition from `old` is invalid."""
    if new not in _NEXT[old]:
        raise EngineFault(f"a hand-off cannot go from {old.name} to {new.name}")
    return new
