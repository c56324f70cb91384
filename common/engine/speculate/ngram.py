"""Guesses by repetition: what followed the newest tokens when they stood there before, in the
prompt or in the answer. No model and no state, so that a request may come from anywhere.

Source: prompt lookup decoding, Saxena 2023.
"""

import numpy as np
from numpy.typing import NDArray

from common.engine.rows.batch import Ints

LONGEST_MATCH = 16  # tokens compared: of several places the one that is alike for longest counts
_NOTHING = np.empty(0, np.int32)


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
        places = self._places(tokens)
        if not len(places):
            return _NOTHING
        followed: Ints = tokens[places[-1] : places[-1] + count]
        return followed if len(followed) == count else np.resize(followed, count)

    def _places(self, tokens: Ints) -> NDArray[np.intp]:
        """Behind tokens like the newest."""
        least = self._min_match
        places = np.flatnonzero(tokens[least - 1 : -1] == tokens[-1]) + least
        for back in range(2, LONGEST_MATCH + 1):
            if not len(places):
                break
            inside = places[places >= back]
            alike = inside[tokens[inside - back] == tokens[-back]]
            if back > least and not len(alike):
                break
            places = alike
        return places
