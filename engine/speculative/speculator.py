"""The configured parts of speculative decoding.

HeadDrafter is a layer after the model. The device computes its drafts at the beginning of the step
that verifies them.

Predicted outputs are texts that clients expect as their responses, used as the best source of
drafts. A prediction is searched as if it followed its prompt. The first tokens of a response that
begins as predicted therefore match as well.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from common.config import SpeculativeConfig
from engine.batch.batch import TO_GUESS, Ints
from engine.batch.request import Request
from engine.speculative.drafter import Drafter
from engine.speculative.ngram import LONGEST_MATCH, NOTHING, NgramDrafter
from engine.speculative.policy import AdaptiveDrafts, AllDrafts, DraftPolicy


class Predictions:
    """The predictions by slot. Engine thread only.

    Args:
        min_match: as in NgramDrafter.
    """

    def __init__(self, min_match: int) -> None:
        self._drafter = NgramDrafter(min_match)
        self._texts: dict[int, Ints] = {}

    def acquired(self, slot: int, request: Request) -> None:
        """Note that the slot has a new request."""
        self._texts.pop(slot, None)
        if request.spec.prediction:
            predicted = np.frombuffer(request.spec.prediction, np.int32)
            prompt = request.token_ids[: request.num_prompt]
            self._texts[slot] = np.concatenate((prompt[-LONGEST_MATCH:], predicted))

    def propose(self, slot: int, tokens: Ints, count: int) -> Ints:
        """Return drafts for the request in a slot, as Drafter.propose does."""
        text = self._texts.get(slot)
        return NOTHING if text is None else self._drafter.found_in(text, tokens, count)


class HeadDrafter:
    """A drafter that returns placeholders. See Drafter."""

    def propose(self, tokens: Ints, count: int) -> Ints:
        return np.full(count, TO_GUESS, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Speculator:
    """The parts of speculation. max_drafts: per row and step, fewer than a page has tokens."""

    drafter: Drafter
    policy: DraftPolicy
    max_drafts: int
    predictions: Predictions = field(default_factory=lambda: Predictions(min_match=1))

    @classmethod
    def of(cls, config: SpeculativeConfig, num_slots: int) -> Self | None:
        """Create the parts, or return None if speculation is disabled."""
        if config.method == "none":
            return None
        most = config.num_speculative_tokens
        policy = AdaptiveDrafts(num_slots, most) if config.adaptive else AllDrafts(most)
        drafter = HeadDrafter() if config.has_layer else NgramDrafter(config.prompt_lookup_min)
        return cls(drafter, policy, most, Predictions(config.prompt_lookup_min))
