"""The decode node of a request, for every policy that has no mind of its own about it.

A decode node is full when its pages are: KV of what runs, and of what this router has placed there
that no Status shows yet. Of nodes about equally full the one with the faster links goes first.
"""

import math
from collections.abc import Sequence

from router.policy.choices import DecodeChoice, PrefillChoice
from router.policy.load import Load

# A link half as fast weighs as much as so large a share of the pages; five halvings at most.
_SHARE_PER_HALVING = 0.05
_MOST_HALVINGS = 5
# For a link whose speed was not measured.
_USUAL_GIB_PER_S = {"nvlink": 200.0, "cuda_ipc": 50.0, "rdma": 20.0, "cma": 8.0, "tcp": 2.0}
_MOST_GIB_PER_S = 1e6
_MAX_KNOWN = 1024  # nodes


class LeastFull:
    """Takes equals in turn."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._turn = 0
        # By address; computed anew when the node's links are others.
        self._speeds: dict[str, tuple[tuple[PrefillChoice, ...], float]] = {}

    def pick(self, choices: Sequence[DecodeChoice]) -> DecodeChoice:
        """One of `choices`, which is not empty."""
        if len(choices) == 1:
            return choices[0]
        speeds = [self._speed(choice) for choice in choices]
        fastest = max(speeds)
        self._turn += 1
        first = self._turn % len(choices)
        best, best_key = choices[first], (math.inf, 0)
        for offset in range(len(choices)):
            at = (first + offset) % len(choices)
            # Whole halvings: two measurements of one kind of link differ by less.
            halvings = min(_MOST_HALVINGS, int(fastest - speeds[at]))
            fullness = self._fullness(choices[at]) + _SHARE_PER_HALVING * halvings
            key = fullness, self._load.decode.requests(choices[at].address)
            if key < best_key:
                best, best_key = choices[at], key
        return best

    def _fullness(self, choice: DecodeChoice) -> float:
        """Share of its pages that is in use or spoken for; 0 where they are not known."""
        if not choice.pages_total:
            return 0.0
        used = max(0, choice.pages_total - choice.pages_free)
        placed = self._load.decode.tokens(choice.address) / max(1, choice.page_size)
        return (used + placed) / choice.pages_total

    def _speed(self, choice: DecodeChoice) -> float:
        """Of its links on average, as log2 of GiB/s."""
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
    """Whatever a node says, a finite number."""
    if link.gib_per_s > 0:  # nor is NaN
        return math.log2(min(link.gib_per_s, _MOST_GIB_PER_S))
    return math.log2(_USUAL_GIB_PER_S.get(link.path, 1.0))
