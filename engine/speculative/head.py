"""Drafts by a drafter layer after the model. The device computes them at the beginning of the step
that verifies them. This module only reserves their positions."""

import numpy as np

from engine.batch.batch import TO_GUESS, Ints


class HeadDrafter:
    """A drafter that returns placeholders. See Drafter."""

    def propose(self, tokens: Ints, count: int) -> Ints:
        return np.full(count, TO_GUESS, np.int32)
