"""A helper process of a router that decodes its images, see common/process/helper.py.

    python -m api.images.decoder DESCRIPTOR...

Decoders hold the GIL, use many times the file's size in memory, and have bugs. In a separate
process the kernel limits them, and a crash does not affect the router.
"""

import base64
import math
import sys

import msgspec

from api.images.jobs import Decoded, ImageJob, Outcome, Refused
from api.images.pixels import opened, pixels_of
from common.errors import InvalidRequest
from common.process import helper
from common.vision_files import VisionFiles

_MOST_ELONGATED = 200


def work(content: bytes) -> bytes:
    try:
        outcome: Outcome = _decoded(msgspec.msgpack.decode(content, type=ImageJob))
    except InvalidRequest as error:
        outcome = Refused(str(error))
    return msgspec.msgpack.encode(outcome)


def _decoded(job: ImageJob) -> Decoded:
    """Decode and resize one image. Raise InvalidRequest if it is invalid or too large."""
    content = job.content
    if job.is_base64:
        try:
            content = base64.b64decode(content, validate=True)
        except ValueError as error:
            raise InvalidRequest(f"an image is not valid base64: {error}") from error
    image = opened(content)
    width, height = image.size
    rows, columns = tokens_of(height, width, job.files, job.max_tokens)
    if rows * columns > job.tokens_left:
        raise InvalidRequest(
            f"messages: an image has {rows * columns} tokens, {job.tokens_left} are left for it: "
            "send fewer or smaller images, or detail low"
        )
    side = job.files.token_side
    lies, pixels = pixels_of(image, rows * side, columns * side)
    return Decoded(columns, rows, pixels) if lies else Decoded(rows, columns, pixels)


def tokens_of(height: int, width: int, files: VisionFiles, max_tokens: int) -> tuple[int, int]:
    """Return rows and columns of the tokens of an image with that many pixels.

    Follows smart_resize of Qwen2VLImageProcessor in transformers.

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


if __name__ == "__main__":
    helper.serve(sys.argv[1:], work)
