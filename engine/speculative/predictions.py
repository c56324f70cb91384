"""Predicted outputs: texts that clients expect as their responses, used as the best source of
drafts.

A prediction is searched as if it followed its prompt. The first tokens of a response that begins as
predicted therefore match as well.
"""

import numpy as np

from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.speculative.ngram import LONGEST_MATCH, NOTHING, NgramDrafter


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
