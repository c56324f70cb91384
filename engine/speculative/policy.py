"""The number of drafts per row.

An accepted draft saves a step of its row. A rejected one costs a token's share of a step. In a
small batch that share is small, since a step reads the weights whatever it computes. In a large
batch it is most of the step.

StepCosts fits the cost of a decode step over past steps: a fixed part and a part per token. Both
change with the batch's contexts and with the machine's other load, so older steps count less. Steps
with the same number of tokens as usual give no information about the cost per token. The
estimate stays until a step differs.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints

_NEWEST_STEP_WEIGHT = 0.05
# Assumed while all steps had the same number of tokens: the token's share of a one-token step. It
# keeps large batches from drafting, which costs most there, before drafting is known to pay off.
_FIRST_SHARE = 0.15
_FIRST_WEIGHT = 0.5  # of this assumption, in tokens squared
_LEAST_DIFFERENCE = 0.5  # tokens
_NEWEST_WEIGHT = 0.15  # of one draft, in its request's acceptance rate
_TYPICAL_WEIGHT = 0.02  # of one verified row, in the rate assumed for new requests
_FIRST_LIKELY = 0.7
# While drafts do not pay off, their estimated rate rises a little with every step, so that they are
# tried again: a response may begin to quote at any time.
_HOPE, _HOPE_WEIGHT = 0.9, 0.003
# After this many steps without drafts, one request in _TRIED_OF gets some regardless, to measure
# their cost. In a busy batch such a step takes a third longer. The first trial is early, since
# nothing is known yet.
_TRIED_AFTER, _TRIED_OF, _FIRST_TRIED_AFTER = 96, 16, 3


class StepCosts:
    def __init__(self) -> None:
        self._seconds: float | None = None
        self._tokens = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def took(self, num_tokens: int, seconds: float) -> None:
        if self._seconds is None:
            self._tokens, self._seconds = float(num_tokens), seconds
            return
        more_tokens, more_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += _NEWEST_STEP_WEIGHT * more_tokens
        self._seconds += _NEWEST_STEP_WEIGHT * more_seconds
        if abs(more_tokens) < _LEAST_DIFFERENCE:
            return
        kept = 1 - _NEWEST_STEP_WEIGHT
        self._variance = kept * (self._variance + _NEWEST_STEP_WEIGHT * more_tokens**2)
        self._covariance = kept * (
            self._covariance + _NEWEST_STEP_WEIGHT * more_tokens * more_seconds
        )

    def share(self, num_tokens: int) -> float:
        """Return the tokens' share of the time of a step with this many tokens, between 0 and 1."""
        if self._seconds is None:
            return _FIRST_SHARE * num_tokens / _first_step(num_tokens)
        average = self._seconds / self._tokens
        first = _FIRST_SHARE * self._seconds / _first_step(self._tokens)
        covariance = self._covariance + _FIRST_WEIGHT * first
        of_token = min(max(covariance / (self._variance + _FIRST_WEIGHT), 0.0), average)
        of_tokens = of_token * num_tokens
        of_step = self._seconds - of_token * self._tokens
        return of_tokens / (of_step + of_tokens) if of_tokens > 0 else 0.0


def _first_step(num_tokens: float) -> float:
    """Return the assumed time of a step of this many tokens, relative to a step of one token."""
    return 1 - _FIRST_SHARE + _FIRST_SHARE * num_tokens


class DraftPolicy(Protocol):
    """The policy for the number of drafts. Engine thread only."""

    def acquired(self, slot: int) -> None:
        """Note that the slot has a new request."""
        ...

    def limits(self, slots: NDArray[np.intp], num_rows: int) -> Ints:
        """Return the maximum number of drafts for each slot, in a step of `num_rows` rows."""
        ...

    def verified(self, slots: NDArray[np.intp], drafted: Ints, accepted: Ints) -> None:
        """Record the number of accepted drafts of each slot. Each slot had at least one draft."""
        ...

    def took(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step without prompts."""
        ...


class AllDrafts:
    """A policy without adaptation: always the maximum number."""

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


class AdaptiveDrafts:
    """An adaptive policy: the number that gives the most tokens per second if every row had it."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._costs = StepCosts()
        # probability that a draft is accepted, given that those before it are
        self._likely = np.zeros(num_slots)
        self._typical = _FIRST_LIKELY
        self._counts = np.arange(max_drafts + 1)
        self._num_without = _TRIED_AFTER - _FIRST_TRIED_AFTER  # consecutive steps
        self._num_trials = 0

    def acquired(self, slot: int) -> None:
        self._likely[slot] = self._typical

    def limits(self, slots: NDArray[np.intp], num_rows: int) -> Ints:
        likely = self._likely[slots]
        tokens = np.cumsum(likely[:, None] ** self._counts, axis=1)  # expected tokens of a row
        steps = 1 + self._costs.share(num_rows) * self._counts  # their cost
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
