"""What clients expect of their answers, as a text to guess from: it is the likeliest to follow.

A prediction is looked in as if it stood behind its prompt: the first tokens of an answer that
begins as expected find their place, too.
"""

import numpy as np

from engine.batch.batch import Ints
from engine.batch.request import Request
from engine.speculative.ngram import LONGEST_MATCH, NOTHING, NgramDrafter


class Predictions:
    """By slot. Engine thread only.

    Args:
        min_match: as of NgramDrafter.
    """

    def __init__(self, min_match: int) -> None:
        self._drafter = NgramDrafter(min_match)
        self._texts: dict[int, Ints] = {}

    def acquired(self, slot: int, request: Request) -> None:
        """It has a new request."""
        self._texts.pop(slot, None)
        if request.spec.prediction:
            predicted = np.frombuffer(request.spec.prediction, np.int32)
            prompt = request.token_ids[: request.num_prompt]
            self._texts[slot] = np.concatenate((prompt[-LONGEST_MATCH:], predicted))

    def propose(self, slot: int, tokens: Ints, count: int) -> Ints:
        """As of Drafter, for the request in a slot."""
        text = self._texts.get(slot)
        return NOTHING if text is None else self._drafter.found_in(text, tokens, count)
