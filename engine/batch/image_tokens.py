"""Image tokens among the tokens of a prompt (common/requests/images.py)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.requests.images import FIRST_IMAGE_TOKEN, Image
from engine.batch.batch import Ints


def in_vocabulary(token_ids: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Return a mask of the tokens that are not image tokens."""
    return token_ids < FIRST_IMAGE_TOKEN


def text_of(token_ids: Ints, images: Sequence[Image]) -> Ints:
    """Return the tokens outside these images."""
    kept = np.ones(len(token_ids), np.bool_)
    for image in images:
        kept[image.at : image.end] = False
    return token_ids[kept]
