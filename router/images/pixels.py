"""Encoded images as Pillow reads them. What it needs to know how large one is, it reads first; only
one that is small enough is decoded."""

import io
import warnings

from PIL import Image, ImageOps

from common.errors import InvalidRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 32 << 20  # of one as it comes: 128 MiB decoded


def size_of(encoded: bytes) -> tuple[int, int]:
    """Height and width, as it is stored. Nothing is decoded.

    Raises:
        InvalidRequest: it is none, or has too many pixels.
    """
    with _opened(encoded) as image:
        width, height = image.size
    if width * height > MAX_PIXELS or not width * height:
        raise InvalidRequest(
            f"an image of {width} x {height} pixels, {MAX_PIXELS >> 20} Mi are allowed"
        )
    return height, width


def pixels_of(encoded: bytes, height: int, width: int) -> tuple[bool, bytes]:
    """Whether the image lies on its side, and its RGB, upright and made so large; of one that lies
    height and width change places. `size_of` has let it through.

    Raises:
        InvalidRequest: it is damaged.
    """
    with _opened(encoded) as image:
        try:
            upright = ImageOps.exif_transpose(image)
            lies = upright.size != image.size
            rgb = _on_white(upright)
        except (OSError, ValueError, SyntaxError, IndexError) as error:
            raise InvalidRequest(f"an image is damaged: {error}") from error
    size = (height, width) if lies else (width, height)
    pixels: bytes = rgb.resize(size, Image.Resampling.BICUBIC).tobytes()
    return lies, pixels


def _on_white(image: Image.Image) -> Image.Image:
    """RGB. What lets a background through has a white one, as transformers has it."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _opened(encoded: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own limit is above ours
            return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"an image is none of {', '.join(FORMATS)}, or damaged") from error
