"""Images in a prompt: pixels, and the tokens that stand for them.

Each token of an image has an id of its own, made of the image's content: a prompt's token ids say
all that its KV depends on. Whatever compares prompts by their tokens (prefix caches, the names of
pages, routers' indices, tiers) tells two images apart, and finds the same one again, without
knowing that there are any. These ids are above those of every vocabulary.
"""

import hashlib
import math
import struct
from collections.abc import Sequence

import msgspec

from common.errors import InvalidRequest
from common.limits import MAX_IMAGES, MAX_PIXEL_BYTES
from protos import images_pb2 as pb

FIRST_IMAGE_TOKEN = 1 << 30  # an id from here on is a token of some image
_CHANNELS = 3


class Image(msgspec.Struct, frozen=True):
    """An image as the encoder of its model takes it, but for its numbers' scale.

    at: the first of its tokens in the prompt.
    rows, columns: of tokens; each is a square of so many pixels as the model says.
    pixels: RGB, 8 bits each, row after row.
    """

    at: int
    rows: int
    columns: int
    pixels: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.at + self.num_tokens

    @property
    def name(self) -> bytes:
        """Of its content: 16 bytes."""
        size = self.rows.to_bytes(4, "little") + self.columns.to_bytes(4, "little")
        digest = hashlib.blake2b(size, digest_size=16, person=b"baton image")
        digest.update(self.pixels)
        return digest.digest()

    @property
    def token_ids(self) -> list[int]:
        """30 bits of each are of its content."""
        drawn = hashlib.shake_128(self.name).digest(4 * self.num_tokens)
        words = struct.unpack(f"<{self.num_tokens}I", drawn)
        return [word % FIRST_IMAGE_TOKEN + FIRST_IMAGE_TOKEN for word in words]

    def fits(self, token_side: int) -> bool:
        """Whether it has the pixels of its tokens, squares of so many pixels a side."""
        return len(self.pixels) == self.num_tokens * token_side**2 * _CHANNELS


def check_images(images: Sequence[Image], token_ids: Sequence[int]) -> None:
    """
    Raises:
        InvalidRequest: they are too many, or in the prompt's tokens is something else in their
            place: then what is computed would be found under the name of another image.
    """
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(f"images: {len(images)} in one request, {MAX_IMAGES} allowed")
    num_bytes = sum(len(image.pixels) for image in images)
    if num_bytes > MAX_PIXEL_BYTES:
        raise InvalidRequest(f"images: {num_bytes} bytes of pixels, {MAX_PIXEL_BYTES} allowed")
    end = 0
    for number, image in enumerate(images):
        side = math.isqrt(len(image.pixels) // (_CHANNELS * max(image.num_tokens, 1)))
        if not side or not image.fits(side):
            raise InvalidRequest(f"images[{number}]: its pixels are not those of its size")
        if not end <= image.at or image.end > len(token_ids):
            raise InvalidRequest(f"images[{number}]: its tokens are not in the prompt")
        if list(token_ids[image.at : image.end]) != image.token_ids:
            raise InvalidRequest(
                f"images[{number}]: in its place are not the tokens of its content"
            )
        end = image.end


def from_proto(protos: Sequence[pb.Image]) -> tuple[Image, ...]:
    """To be checked."""
    return tuple(Image(each.at, each.rows, each.columns, each.pixels) for each in protos)


def to_proto(images: Sequence[Image]) -> list[pb.Image]:
    return [
        pb.Image(at=each.at, rows=each.rows, columns=each.columns, pixels=each.pixels)
        for each in images
    ]
