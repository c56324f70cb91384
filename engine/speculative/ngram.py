"""Guesses by repetition: what followed the newest tokens when they stood there before, in the
prompt or in the answer. No model and no state, so that a request may come from anywhere.

Source: prompt lookup decoding, Saxena 2023.
"""

import numpy as np
from numpy.typing import NDArray

from engine.batch.batch import Ints

LONGEST_MATCH = 16  # tokens compared: of several places the one that is alike for longest counts
NOTHING = np.empty(0, np.int32)


class NgramDrafter:
    """
    Args:
        min_match: so many of the newest tokens must have stood before, one after the other.
    """

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match

    def propose(self, tokens: Ints, count: int) -> Ints:
        """From the place that is alike for longest, of these the last. A continuation that reaches
        the newest token goes round: what was said twice is expected once more."""
        followed = self.found_in(tokens, tokens, count)
        return followed if len(followed) in (0, count) else np.resize(followed, count)

    def found_in(self, text: Ints, tokens: Ints, count: int) -> Ints:
        """Of another text, likewise; as much as there is of it."""
        places = self._places(text, tokens)
        return text[places[-1] : places[-1] + count] if len(places) else NOTHING

    def _places(self, text: Ints, tokens: Ints) -> NDArray[np.intp]:
        """Of the text, behind tokens like the newest, where something follows."""
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
