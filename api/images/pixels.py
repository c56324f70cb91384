"""Encoded images as Pillow reads them, in a process of their own (decoder.py).

The header says how large an image is. Only one that is small enough is decoded.
"""

import io
import warnings
from collections.abc import Mapping

from PIL import Image, ImageOps

from common.errors import InvalidRequest

# Of one as it is stored. Decoding takes, in bytes a pixel at worst: JPEG 12 (progressive CMYK has
# coefficients, and 2 where it is decoded smaller), PNG 13, WEBP 17 (libwebp has three canvases),
# GIF 13.
_MI = 1 << 20
MAX_PIXELS: Mapping[str, int] = {
    "PNG": 16 * _MI,
    "JPEG": 32 * _MI,
    "WEBP": 12 * _MI,
    "GIF": 16 * _MI,
}
FORMATS = tuple(MAX_PIXELS)
_CAMERAS = "MPO"  # Pillow's name of a JPEG that has others behind it
# JPEG is decoded smaller where it stays this many times as large as what the model takes.
_DRAFT_GAP = 2


def opened(encoded: bytes) -> Image.Image:
    """Read the header. Nothing is decoded.

    Raises:
        InvalidRequest: it is no image, or has too many pixels.
    """
    Image.MAX_IMAGE_PIXELS = max(MAX_PIXELS.values())  # Pillow refuses twice as many by itself
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"an image is too large: {error}") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidRequest(f"an image is none of {', '.join(FORMATS)}, or damaged") from error
    width, height = image.size
    kind = "JPEG" if image.format == _CAMERAS else str(image.format)
    if width * height > MAX_PIXELS[kind] or not width * height:
        raise InvalidRequest(
            f"an image of {width} x {height} pixels: for {kind} {MAX_PIXELS[kind] >> 20} Mi are "
            "allowed"
        )
    return image


def pixels_of(image: Image.Image, height: int, width: int) -> tuple[bool, bytes]:
    """Return whether the image lies on its side, and its RGB, upright and resized. Height and width
    of an image that lies change places.

    Args:
        image: as `opened` returns it, to be used for nothing else.
    Raises:
        InvalidRequest: it is damaged.
    """
    try:
        image.draft(None, (_DRAFT_GAP * width, _DRAFT_GAP * height))
        image = image.copy()  # what has decoded it holds several times its size
        stored = image.size
        ImageOps.exif_transpose(image, in_place=True)
        lies = image.size != stored
        image = _on_white(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow has no common one
        raise InvalidRequest(f"an image is damaged: {error}") from error
    size = (height, width) if lies else (width, height)
    pixels: bytes = image.resize(size, Image.Resampling.BICUBIC).tobytes()
    return lies, pixels


def _on_white(image: Image.Image) -> Image.Image:
    """Return it as RGB. What is transparent becomes white, as in transformers."""
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    rgba = Image.alpha_composite(white, rgba)
    del white, image
    return rgba.convert("RGB")
