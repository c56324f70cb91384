"""The number of tokens of an image, from its size and the model's limits.

Follows smart_resize of Qwen2VLImageProcessor in transformers.
"""

import math

from common.errors import InvalidRequest
from common.vision_files import VisionFiles

_MOST_ELONGATED = 200


def tokens_of(height: int, width: int, files: VisionFiles, max_tokens: int) -> tuple[int, int]:
    """Return rows and columns of the tokens of an image with that many pixels.

    Raises:
        InvalidRequest: its aspect ratio is too large.
    """
    side = files.token_side
    least, most = files.min_pixels, min(files.max_pixels, max_tokens * side**2)
    if max(height, width) > _MOST_ELONGATED * min(height, width):
        raise InvalidRequest(
            f"an image of {width} x {height} pixels is more than {_MOST_ELONGATED} times as long "
            "as it is wide"
        )
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        shrink = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / shrink / side))
        columns = max(1, math.floor(width / shrink / side))
    elif rows * columns * side**2 < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
    return rows, columns
