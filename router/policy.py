"""Which nodes a request goes to. Knows what the nodes last said, and no connection."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """A decode node that takes requests now."""

    address: str
    prefill: tuple[str, ...]  # prefill nodes that it can read from; empty where it prefills itself
    num_live: int  # requests of this router on it


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one request goes."""

    decode: str
    prefill: tuple[str, ...]  # candidates in order of preference


class Policy(Protocol):
    """Called once per request, on the router's event loop; must not block."""

    def pick(self, token_ids: Sequence[int], choices: Sequence[DecodeChoice]) -> Placement:
        """Chooses one of `choices`, which is never empty, for a prompt of `token_ids`."""
        ...


class RoundRobin:
    """Takes decode and prefill nodes in turn, and every pair of the two as often as any other."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """
        Args:
            prefill, decode: all nodes; requests take those of them that are usable at the time.
        """
        self._prefill = list(prefill)
        self._decode = list(decode)
        self._num_picked = 0

    def pick(self, token_ids: Sequence[int], choices: Sequence[DecodeChoice]) -> Placement:
        turn = self._num_picked
        self._num_picked += 1
        usable = {choice.address: choice for choice in choices}
        decode = next(address for address in _rotated(self._decode, turn) if address in usable)
        if not self._prefill:
            return Placement(decode, ())
        # With as many of one as of the other, two plain rotations would always pick the same pairs.
        shift = turn // math.lcm(len(self._prefill), len(self._decode))
        candidates = _rotated(self._prefill, turn + shift)
        readable = usable[decode].prefill
        return Placement(decode, tuple(address for address in candidates if address in readable))


def _rotated(addresses: list[str], turn: int) -> list[str]:
    first = turn % len(addresses)
    return addresses[first:] + addresses[:first]
