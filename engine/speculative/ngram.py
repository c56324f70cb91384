"""Drafts by repetition (prompt lookup): the tokens that followed an earlier occurrence of the
newest tokens, in the prompt or in the response. It needs no model and no state, so that a request
may come from any node.

Source: prompt lookup decoding, Saxena 2023.
"""

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints

LONGEST_MATCH = 16  # maximum tokens compared: of several occurrences the longest match counts
NOTHING = np.empty(0, np.int32)


class NgramDrafter:
    """A drafter that searches for the newest tokens in the request's own text.

    Args:
        min_match: minimum number of newest tokens that must match.
    """

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match

    def propose(self, tokens: Ints, count: int) -> Ints:
        """Return the tokens after the longest match, or after the last of equally long ones. A
        continuation that reaches the newest token wraps around, because a repeated text is expected
        to repeat again."""
        followed = self.found_in(tokens, tokens, count)
        return followed if len(followed) in (0, count) else np.resize(followed, count)

    def found_in(self, text: Ints, tokens: Ints, count: int) -> Ints:
        """Return the tokens after the best match in another text, as far as that text goes."""
        places = self._places(text, tokens)
        return text[places[-1] : places[-1] + count] if len(places) else NOTHING

    def _places(self, text: Ints, tokens: Ints) -> NDArray[np.intp]:
        """Return the positions in the text after matches of the newest tokens, where something
        follows."""
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
