"""Helper process of a router that decodes images (see common/process/helper.py).

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
from typing import NamedTuple

import msgspec
from PIL import Image, ImageOps

from api.images.picture import Decoded, ImageJob, Outcome, Refused
from common.errors import InvalidRequest
from common.model_directory import AreaSize, ClipSize, SquareSize, StretchedSize, VisionFiles
from common.process import helper

# Limits of stored pixels. Worst cases of decoding, in bytes a pixel: JPEG 12 (progressive CMYK
# keeps coefficients, 2 if decoded at a smaller size), PNG 13, WEBP 17 (libwebp keeps three
# canvases), GIF 13.
_MI = 1 << 20
MAX_PIXELS: Mapping[str, int] = {
    "PNG": 16 * _MI,
    "JPEG": 32 * _MI,
    "WEBP": 12 * _MI,
    "GIF": 16 * _MI,
}
FORMATS = tuple(MAX_PIXELS)
_CAMERAS = "MPO"  # Pillow's name of a JPEG with further images
# A JPEG is decoded at a smaller size that is at least this many times the model's size.
_DRAFT_GAP = 2


# The header contains an image's size. Only images that are small enough are decoded.
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
            f"an image has {width} x {height} pixels: {kind} may have at most "
            f"{MAX_PIXELS[kind] >> 20} Mi pixels"
        )
    return image


class Fit(NamedTuple):
    """The size of an image for a model.

    Attributes:
        rows, columns: size in tokens.
        resized: height and width in pixels. Pixels beyond the tokens are cropped evenly.
    """

    rows: int
    columns: int
    resized: tuple[int, int]

    @property
    def turned(self) -> "Fit":
        height, width = self.resized
        return Fit(self.columns, self.rows, (width, height))


def pixels_of(image: Image.Image, fit: Fit, files: VisionFiles) -> tuple[Fit, bytes]:
    """Return the size of the upright image, and its RGB pixels, upright and resized.

    Args:
        image: result of `opened`. It must not be used afterwards.
        fit: size of the image as it is stored, which may be rotated.

    Raises:
        InvalidRequest: the image is damaged.
    """
    try:
        image.draft(None, tuple(_DRAFT_GAP * each for each in reversed(fit.resized)))
        image = image.copy()  # frees the decoder, which holds several times the image's size
        stored = image.size
        ImageOps.exif_transpose(image, in_place=True)
        fit = fit if image.size == stored else fit.turned
        image = _on_white(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow has no common error class
        raise InvalidRequest(f"an image is damaged: {error}") from error
    height, width = fit.resized
    kept = fit.rows * files.token_side, fit.columns * files.token_side
    top, left = (height - kept[0]) // 2, (width - kept[1]) // 2
    resized = image.resize((width, height), Image.Resampling(files.resample))
    return fit, resized.crop((left, top, left + kept[1], top + kept[0])).tobytes()


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
    fit = fit_of(height, width, job.files, job.max_tokens, job.num_frames)
    num_tokens = fit.rows * fit.columns
    if num_tokens > job.tokens_left:
        raise InvalidRequest(
            f"messages: {'a frame' if job.num_frames else 'an image'} has {num_tokens} tokens, "
            f"{job.tokens_left} are left for it: send fewer or smaller images, or detail low"
        )
    fit, pixels = pixels_of(image, fit, job.files)
    return Decoded(fit.rows, fit.columns, pixels)


def fit_of(
    height: int, width: int, files: VisionFiles, max_tokens: int, num_frames: int = 0
) -> Fit:
    """Return the size for an image with that many pixels.

    Args:
        num_frames: number of frames of its video. 0: it is an image.

    Raises:
        InvalidRequest: its aspect ratio is too large, or no size has few enough tokens.
    """
    if max(height, width) > _MOST_ELONGATED * min(height, width):
        raise InvalidRequest(
            f"an image of {width} x {height} pixels is more than {_MOST_ELONGATED} times as long "
            "as it is wide"
        )
    side = files.token_side
    match files.video.size if num_frames and files.video else files.size:
        case AreaSize() as size:
            return _of_area((height, width), size, side, max_tokens)
        case ClipSize() as size:
            grown = max(1.0, side / height, side / width)
            grown_size = int(height * grown), int(width * grown)
            whole = round(num_frames / files.frames) * files.frames
            return _of_area(grown_size, size, side, max_tokens, num_frames, whole)
        case SquareSize(shorter_side=shorter):  # follows CLIPImageProcessor in transformers
            longer = int(shorter * max(height, width) / min(height, width))
            resized = (shorter, longer) if height <= width else (longer, shorter)
        case StretchedSize(side=whole_side):
            resized = (whole_side, whole_side)
    count = files.tokens_per_side
    if count**2 > max_tokens:
        raise InvalidRequest(
            f"an image of this model has {count**2} tokens, {max_tokens} are allowed: detail low "
            "is not supported"
        )
    return Fit(count, count, resized)


def _of_area(
    given: tuple[int, int],
    size: AreaSize | ClipSize,
    side: int,
    max_tokens: int,
    num_frames: int = 1,
    rounded: int = 1,
) -> Fit:
    """Follow smart_resize of Qwen2VLImageProcessor and of Qwen3VLVideoProcessor in transformers.

    Args:
        given: height and width.
        num_frames: number of frames whose pixels have a common limit.
        rounded: that number, rounded to whole temporal patches.
    """
    height, width = given
    most = min(size.max_pixels, max_tokens * side**2 * min(num_frames, rounded))
    least = min(size.min_pixels, most)
    rows, columns = round(height / side), round(width / side)
    pixels = rows * columns * side**2 * rounded
    if pixels > most:
        shrink = math.sqrt(num_frames * height * width / most)
        rows = max(1, math.floor(height / shrink / side))
        columns = max(1, math.floor(width / shrink / side))
    elif pixels < least:
        grow = math.sqrt(least / (num_frames * height * width))
        rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
    return Fit(rows, columns, (rows * side, columns * side))


if __name__ == "__main__":
    helper.serve(sys.argv[1:], work)
