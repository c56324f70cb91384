"""Default choice of the decode node, for policies without a rule for it.

A decode node is as full as its KV pages: those in use, and those of requests placed by this router
that no Status includes yet. Among nodes about equally full, the one with faster links goes first.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

from router.policy.choices import DecodeChoice, PrefillChoice
from router.policy.load import NodeLoad

# A link half as fast counts as this share of the pages, for at most five halvings.
_SHARE_PER_HALVING = 0.05
_MOST_HALVINGS = 5
# Assumed speeds of links that are not measured.
_USUAL_GIB_PER_S = {"nvlink": 200.0, "cuda_ipc": 50.0, "rdma": 20.0, "cma": 8.0, "tcp": 2.0}
_MOST_GIB_PER_S = 1e6
_MAX_KNOWN = 1024  # nodes

T = TypeVar("T")


class RotatingOrder:
    """Rotation among nodes that are otherwise equal."""

    def __init__(self) -> None:
        self._turn = 0

    def rotated(self, items: list[T]) -> list[T]:
        """Return the items, rotated to another first one at each call."""
        if len(items) < 2:
            return items
        self._turn += 1
        first = self._turn % len(items)
        return items[first:] + items[:first]


class LeastLoadedDecode:
    """Choice of the least full decode node. Equal nodes take turns."""

    def __init__(self, load: NodeLoad) -> None:
        self._load = load
        self._turn = 0
        # By address. Recomputed when the node's links change.
        self._speeds: dict[str, tuple[tuple[PrefillChoice, ...], float]] = {}

    def pick(self, choices: Sequence[DecodeChoice]) -> DecodeChoice:
        """Return one of `choices`, which is not empty."""
        if len(choices) == 1:
            return choices[0]
        speeds = [self._speed(choice) for choice in choices]
        fastest = max(speeds)
        self._turn += 1
        first = self._turn % len(choices)
        best, best_key = choices[first], (math.inf, 0)
        for offset in range(len(choices)):
            at = (first + offset) % len(choices)
            # Whole halvings: measurements of one kind of link differ by less.
            halvings = min(_MOST_HALVINGS, int(fastest - speeds[at]))
            fullness = self._fullness(choices[at]) + _SHARE_PER_HALVING * halvings
            key = fullness, self._load.decode.requests(choices[at].address)
            if key < best_key:
                best, best_key = choices[at], key
        return best

    def _fullness(self, choice: DecodeChoice) -> float:
        """Return the share of its pages in use or reserved. 0 if they are not known."""
        if not choice.pages_total:
            return 0.0
        used = max(0, choice.pages_total - choice.pages_free)
        placed = self._load.decode.tokens(choice.address) / max(1, choice.page_size)
        return (used + placed) / choice.pages_total

    def _speed(self, choice: DecodeChoice) -> float:
        """Return the mean speed of its links, as log2 of GiB/s."""
        known = self._speeds.get(choice.address)
        if known is not None and known[0] is choice.prefill:
            return known[1]
        if len(self._speeds) >= _MAX_KNOWN:
            self._speeds.clear()
        logs = [_log2_speed(link) for link in choice.prefill]
        speed = sum(logs) / len(logs) if logs else 0.0
        self._speeds[choice.address] = choice.prefill, speed
        return speed


def _log2_speed(link: PrefillChoice) -> float:
    """Return the log2 speed of a link. It is finite for any reported value."""
    if link.gib_per_s > 0:  # rejects NaN too
        return math.log2(min(link.gib_per_s, _MOST_GIB_PER_S))
    return math.log2(_USUAL_GIB_PER_S.get(link.path, 1.0))
