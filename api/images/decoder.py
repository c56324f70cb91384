"""A helper process of a router that decodes its images, see common/process/helper.py.

    python -m api.images.decoder DESCRIPTOR...

Decoders hold the GIL, use many times the file's size in memory, and have bugs. In a separate
process the kernel limits them, and a crash does not affect the router.
"""

import base64
import io
import math
import sys
import warnings
from collections.abc import Mapping

import msgspec
from PIL import Image, ImageOps

from api.images.picture import Decoded, ImageJob, Outcome, Refused
from common.errors import InvalidRequest
from common.model_directory import VisionFiles
from common.process import helper

# Limits of stored pixels. Decoding takes, in bytes a pixel at worst: JPEG 12 (progressive CMYK has
# coefficients, and 2 if it is decoded at a smaller size), PNG 13, WEBP 17 (libwebp has three
# canvases), GIF 13.
_MI = 1 << 20
MAX_PIXELS: Mapping[str, int] = {
    "PNG": 16 * _MI,
    "JPEG": 32 * _MI,
    "WEBP": 12 * _MI,
    "GIF": 16 * _MI,
}
FORMATS = tuple(MAX_PIXELS)
_CAMERAS = "MPO"  # Pillow's name of a JPEG followed by further images
# A JPEG is decoded at a smaller size that is at least this many times the model's size.
_DRAFT_GAP = 2


# Decoding of images with Pillow, in a process of its own (decoder.py).
#
# The header has an image's size. Only an image that is small enough is decoded.
def opened(encoded: bytes) -> Image.Image:
    """Open an image by its header, without decoding it.

    Raises:
        InvalidRequest: it is not an image, or has too many pixels.
    """
    Image.MAX_IMAGE_PIXELS = max(MAX_PIXELS.values())  # Pillow itself rejects twice as many
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"an image is too large: {error}") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidRequest(f"an image is invalid: expected {', '.join(FORMATS)}") from error
    width, height = image.size
    kind = "JPEG" if image.format == _CAMERAS else str(image.format)
    if width * height > MAX_PIXELS[kind] or not width * height:
        raise InvalidRequest(
            f"an image of {width} x {height} pixels: for {kind} {MAX_PIXELS[kind] >> 20} Mi are "
            "allowed"
        )
    return image


def pixels_of(image: Image.Image, height: int, width: int) -> tuple[bool, bytes]:
    """Return whether the image is stored on its side, and its RGB pixels, upright and resized.

    Height and width of an image on its side are swapped.

    Args:
        image: the result of `opened`. It must not be used afterwards.

    Raises:
        InvalidRequest: it is damaged.
    """
    try:
        image.draft(None, (_DRAFT_GAP * width, _DRAFT_GAP * height))
        image = image.copy()  # releases the decoder, which holds several times the image's size
        stored = image.size
        ImageOps.exif_transpose(image, in_place=True)
        lies = image.size != stored
        image = _on_white(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow has no common error class
        raise InvalidRequest(f"an image is damaged: {error}") from error
    size = (height, width) if lies else (width, height)
    pixels: bytes = image.resize(size, Image.Resampling.BICUBIC).tobytes()
    return lies, pixels


def _on_white(image: Image.Image) -> Image.Image:
    """Return the image as RGB. Transparent pixels become white, as in transformers."""
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    rgba = Image.alpha_composite(white, rgba)
    del white, image
    return rgba.convert("RGB")


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
