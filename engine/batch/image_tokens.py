"""Functions on image tokens among the tokens of a prompt (common/requests/images.py)."""

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


def end_outside(
    images: Sequence[Image], start: int, end: int, num_tokens: int, page_size: int
) -> int:
    """Return the end of a chunk that begins at `start` and does not end within an image.

    It is the last such page boundary up to `end`, or else the next one, or the end of the prompt.

    Args:
        start: page aligned.
        end: page aligned, or num_tokens, the length of the prompt.
    """

    def within(token: int) -> bool:
        return any(image.at < token < image.end for image in images)

    shorter = end
    while shorter > start and within(shorter):
        shorter = (shorter - 1) // page_size * page_size
    if shorter > start:
        return shorter
    while within(end):
        end = min(end + page_size, num_tokens)
    return end
