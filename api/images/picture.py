"""An image as a client sends it, and messages between a router and its image decoder."""

import msgspec

from common.model_directory import VisionFiles


class ImageInput(msgspec.Struct, frozen=True):
    source: str | bytes  # data:...;base64,... or a URL. bytes: the file
    low_detail: bool = False


class ImageJob(msgspec.Struct, frozen=True):
    """An image to be decoded and resized.

    Attributes:
        content: the file.
        is_base64: whether `content` is base64 of the file instead.
        max_tokens: a larger image is reduced to this size.
        tokens_left: an image with more tokens is rejected.
    """

    content: bytes
    is_base64: bool
    files: VisionFiles
    max_tokens: int
    tokens_left: int


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """An image at the model's size."""

    rows: int
    columns: int
    pixels: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The message of an InvalidRequest."""

    sentence: str


Outcome = Decoded | Refused
