"""What a router asks of the program that decodes its images, and what that answers."""

import msgspec

from common.vision_files import VisionFiles


class Job(msgspec.Struct, frozen=True):
    """An image to be decoded and brought to size.

    Attributes:
        content: the file.
        is_base64: whether `content` is the base64 of it instead.
        max_tokens: a larger image is made smaller.
        tokens_left: an image with more is refused.
    """

    content: bytes
    is_base64: bool
    files: VisionFiles
    max_tokens: int
    tokens_left: int


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """An image at the size that its model takes."""

    rows: int
    columns: int
    pixels: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An InvalidRequest."""

    sentence: str


Outcome = Decoded | Refused
