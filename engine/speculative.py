"""Speculative decoding: drafters that propose tokens, and the number of drafts that pays off.

A rejected draft costs time, but never changes the response. `NgramDrafter` repeats earlier text
(prompt lookup): it proposes the tokens that followed an earlier occurrence of the newest tokens, in
the prompt or in the response. It needs no model and no state. `HeadDrafter` stands for a draft
layer or a draft model. The device computes its drafts at the beginning of the step that verifies
them.

Predicted outputs are texts that clients expect as their responses, the best source of drafts. A
prediction is searched as if it followed its prompt, so that even the first tokens can match.

The number of drafts: an accepted draft saves a step of its row. A rejected draft costs one token's
share of a step. In a small batch this share is small, because a step reads all weights anyway. In a
large batch it is most of the step. StepCosts fits the cost of past decode steps: a fixed part and a
part per token. Both change with the contexts and with other load of the machine, so older steps
count less. Steps with the same number of tokens as usual give no information about the cost per
token. The estimate then stays unchanged.

Source: prompt lookup decoding, Saxena 2023.
"""

from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from common.config import SpeculativeConfig
from engine.batch.batch import TO_GUESS, Ints
from engine.batch.request import Request


class Drafter(Protocol):
    """A drafter of one node. Engine thread only. Called for every request and step, so it may take
    only some microseconds."""

    def propose(self, tokens: Ints, count: int) -> Ints:
        """Return the most likely continuation.

        Args:
            tokens: all tokens of a request that the CPU knows, at least one, as a view. With
                overlap, the request is already one step further.
            count: number of tokens wanted.
        Returns:
            At most `count` tokens, in order. Empty without a proposal.
        """
        ...


LONGEST_MATCH = 16  # maximum tokens compared. The occurrence with the longest match counts
NOTHING = np.empty(0, np.int32)


class NgramDrafter:
    """Searches the request's own text for the newest tokens (prompt lookup).

    Args:
        min_match: minimum number of newest tokens that must match.
    """

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match

    def propose(self, tokens: Ints, count: int) -> Ints:
        """Return the tokens after the longest match, or after the last of equally long ones.

        A continuation that reaches the newest token wraps around, because a repeated text is
        expected to repeat again.
        """
        followed = self.found_in(tokens, tokens, count)
        return followed if len(followed) in (0, count) else np.resize(followed, count)

    def found_in(self, text: Ints, tokens: Ints, count: int) -> Ints:
        """Return the tokens after the best match in another text, up to the end of that text."""
        places = self._places(text, tokens)
        return text[places[-1] : places[-1] + count] if len(places) else NOTHING

    def _places(self, text: Ints, tokens: Ints) -> NDArray[np.intp]:
        """Return the positions after matches of the newest tokens in the text, except at its
        end."""
        least = self._min_match
        if len(tokens) < least:
            return np.empty(0, np.intp)
        places = np.flatnonzero(text[least - 1 : -1] == tokens[-1]) + least
        for back in range(2, LONGEST_MATCH + 1):
            if not len(places) or back > len(tokens):
                break
            inside = places[places >= back]
            alike = inside[text[inside - back] == tokens[-back]]
            if back > least and not len(alike):
                break
            places = alike
        return places


_NEWEST_STEP_WEIGHT = 0.05
# Assumed until step sizes differ: the token's share of a one-token step. Drafts cost most in large
# batches. This value prevents them there until drafting is known to pay off.
_FIRST_SHARE = 0.15
_FIRST_WEIGHT = 0.5  # weight of this assumption, in tokens squared
_LEAST_DIFFERENCE = 0.5  # tokens
_NEWEST_WEIGHT = 0.15  # of one draft, in the acceptance rate of its request
_TYPICAL_WEIGHT = 0.02  # of one verified row, in the acceptance rate assumed for new requests
_FIRST_LIKELY = 0.7
# While drafts do not pay off, their estimated acceptance rate rises a little with every step, so
# that they are tried again: a response may begin to quote at any time.
_HOPE, _HOPE_WEIGHT = 0.9, 0.003
# After this number of steps without drafts, one request in _TRIED_OF gets some anyway, to measure
# their cost. In a busy batch, such a step takes a third longer. The first trial is early, because
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


class DraftPolicy:
    """Decides the number of drafts: always the maximum. Engine thread only."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts

    def acquired(self, slot: int) -> None:
        """Record that the slot has a new request."""

    def limits(self, slots: NDArray[np.intp], num_rows: int) -> Ints:
        """Return the maximum number of drafts for each slot, in a step of `num_rows` rows."""
        return np.full(len(slots), self._max_drafts, np.int32)

    def verified(self, slots: NDArray[np.intp], drafted: Ints, accepted: Ints) -> None:
        """Record the number of accepted drafts of each slot. Each slot had at least one draft."""

    def took(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step without prompts."""


class AdaptiveDrafts(DraftPolicy):
    """An adaptive policy. Chooses the number of drafts that gives the most tokens per second if
    every row has it."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self._costs = StepCosts()
        # Probability that a draft is accepted, if the drafts before it are.
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
        steps = 1 + self._costs.share(num_rows) * self._counts  # cost of these tokens
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


class Predictions:
    """Predicted outputs by slot. Engine thread only.

    Args:
        min_match: see NgramDrafter.
    """

    def __init__(self, min_match: int) -> None:
        self._drafter = NgramDrafter(min_match)
        self._texts: dict[int, Ints] = {}

    def acquired(self, slot: int, request: Request) -> None:
        self._texts.pop(slot, None)
        if request.spec.prediction:
            predicted = np.frombuffer(request.spec.prediction, np.int32)
            prompt = request.token_ids[: request.num_prompt]
            self._texts[slot] = np.concatenate((prompt[-LONGEST_MATCH:], predicted))

    def propose(self, slot: int, tokens: Ints, count: int) -> Ints:
        """Return drafts for the request in a slot, like Drafter.propose."""
        text = self._texts.get(slot)
        return NOTHING if text is None else self._drafter.found_in(text, tokens, count)


class HeadDrafter:
    """A drafter that returns placeholders, because the device draws the drafts. See Drafter."""

    def propose(self, tokens: Ints, count: int) -> Ints:
        return np.full(count, TO_GUESS, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Speculator:
    """The parts of speculative decoding. max_drafts: per row and step, less than the page size."""

    drafter: Drafter
    policy: DraftPolicy
    max_drafts: int
    predictions: Predictions = field(default_factory=lambda: Predictions(min_match=1))

    @classmethod
    def of(cls, config: SpeculativeConfig, num_slots: int) -> Self | None:
        """Create the parts. Return None if speculative decoding is disabled."""
        most = config.max_drafts
        if not most:
            return None
        policy = AdaptiveDrafts(num_slots, most) if config.adaptive else DraftPolicy(most)
        drafter = HeadDrafter() if config.has_layers else NgramDrafter(config.prompt_lookup_min)
        return cls(drafter, policy, most, Predictions(config.prompt_lookup_min))
