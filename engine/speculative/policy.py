"""How many drafts a row may have.

A draft that stands saves a step of its row; one that does not has cost a token's share of a step.
In a small batch that share is small, since a step reads the weights whatever it computes; in a
large one it is most of the step.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints
from engine.speculative.costs import StepCosts

_NEWEST_WEIGHT = 0.15  # of a draft, in how likely one of its request is to stand
_TYPICAL_WEIGHT = 0.02  # of a verified row, in what is expected of a request that is new
_FIRST_LIKELY = 0.7
# Where drafts do not pay they are thought a little better of with every step, and tried again: an
# answer may begin to quote at any time.
_HOPE, _HOPE_WEIGHT = 0.9, 0.003
# After so many steps without any, one request in so many is given some, whatever is thought of
# them: else it would never be known what they cost. In a batch that computes all the time such a
# step takes a third as long again. The first time it is soon, for nothing is known.
_TRIED_AFTER, _TRIED_OF, _FIRST_TRIED_AFTER = 96, 16, 3


class DraftPolicy(Protocol):
    """Engine thread only."""

    def acquired(self, slot: int) -> None:
        """It has a new request."""
        ...

    def limits(self, slots: NDArray[np.intp], num_rows: int) -> Ints:
        """Drafts for each, at most, in a step of so many rows."""
        ...

    def verified(self, slots: NDArray[np.intp], drafted: Ints, accepted: Ints) -> None:
        """So many drafts, one at least, of each have stood."""
        ...

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step without prompts."""
        ...


class AllDrafts:
    """As many as there are."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts

    def acquired(self, slot: int) -> None:
        pass

    def limits(self, slots: NDArray[np.intp], num_rows: int) -> Ints:
        return np.full(len(slots), self._max_drafts, np.int32)

    def verified(self, slots: NDArray[np.intp], drafted: Ints, accepted: Ints) -> None:
        pass

    def took(self, num_tokens: int, seconds: float) -> None:
        pass


class PayingDrafts:
    """As many as give the most tokens a second, if every row had them."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._costs = StepCosts()
        self._likely = np.zeros(num_slots)  # that a draft stands, if those before it do
        self._typical = _FIRST_LIKELY
        self._counts = np.arange(max_drafts + 1)
        self._num_without = _TRIED_AFTER - _FIRST_TRIED_AFTER  # steps in turn
        self._num_trials = 0

    def acquired(self, slot: int) -> None:
        self._likely[slot] = self._typical

    def limits(self, slots: NDArray[np.intp], num_rows: int) -> Ints:
        likely = self._likely[slots]
        tokens = np.cumsum(likely[:, None] ** self._counts, axis=1)  # to be expected of a row
        steps = 1 + self._costs.share(num_rows) * self._counts  # what they cost
        limits: Ints = np.argmax(tokens / steps, axis=1).astype(np.int32)
        none = slots[limits == 0]
        self._likely[none] += _HOPE_WEIGHT * (_HOPE - self._likely[none])
        self._num_without = self._num_without + 1 if len(none) == len(slots) else 0
        if self._num_without > _TRIED_AFTER:
            self._num_without = 0
            self._num_trials += 1
            limits[self._num_trials % min(_TRIED_OF, len(slots)) :: _TRIED_OF] = self._counts[-1]
        return limits

    def verified(self, slots: NDArray[np.intp], drafted: Ints, accepted: Ints) -> None:
        likely = 1 - (1 - self._likely[slots]) * (1 - _NEWEST_WEIGHT) ** accepted
        failed = accepted < drafted
        likely[failed] *= 1 - _NEWEST_WEIGHT
        self._likely[slots] = likely
        stood = float((accepted / (accepted + failed)).mean())
        weight = 1 - (1 - _TYPICAL_WEIGHT) ** len(slots)
        self._typical += weight * (stood - self._typical)

    def took(self, num_tokens: int, seconds: float) -> None:
        self._costs.took(num_tokens, seconds)
