"""Tokens of images among those of a prompt (common/requests/images.py)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.requests.images import FIRST_IMAGE_TOKEN, Image
from engine.batch.batch import Ints


def in_vocabulary(token_ids: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Which of them are no tokens of images."""
    return token_ids < FIRST_IMAGE_TOKEN


def text_of(token_ids: Ints, images: Sequence[Image]) -> Ints:
    """Those that are no tokens of these images."""
    kept = np.ones(len(token_ids), np.bool_)
    for image in images:
        kept[image.at : image.end] = False
    return token_ids[kept]
