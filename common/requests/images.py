"""Images and videos in a prompt: pixels, and the tokens that represent them.

Encoders see a few consecutive frames of a video together, a temporal patch. Each temporal patch is
an `Image` with several frames.

Each token of an image has an id derived from the image's content, so the token ids of a prompt
determine its KV. Code that compares prompts by tokens (prefix caches, page hashes, routers'
indices, offload tiers) therefore works for images too. These ids are above all vocabularies.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from functools import cached_property

import msgspec

from common.errors import InvalidRequest
from common.limits import MAX_IMAGES, MAX_PIXEL_BYTES, MAX_TOKENS
from protos import images_pb2 as pb

FIRST_IMAGE_TOKEN = 1 << 30  # ids of image tokens start here
_CHANNELS = 3


class Image(msgspec.Struct, frozen=True, dict=True):
    """An image, or a temporal patch of a video, in the encoder's input size.

    Attributes:
        at: position of its first token in the prompt.
        rows, columns: size in tokens. The model defines how many pixels form a token.
        pixels: RGB, 8 bits each, row by row and frame by frame.
        frames: 1 for an image.
        time: for a temporal patch that continues the video of the previous one: position on the
            time axis, relative to the video's first patch. None: it continues no video.
    """

    at: int
    rows: int
    columns: int
    pixels: bytes
    frames: int = 1
    time: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.at + self.num_tokens

    @cached_property
    def name(self) -> bytes:
        """Hash of its content, 16 bytes."""
        size = self.rows.to_bytes(4, "little") + self.columns.to_bytes(4, "little")
        digest = hashlib.blake2b(size, digest_size=16, person=b"baton image")
        digest.update(self.pixels)
        return digest.digest()

    @property
    def token_ids(self) -> list[int]:
        """Token ids, with 30 bits each from the content and the time, on which KV depends."""
        time = b"" if self.time is None else self.time.to_bytes(4, "little")
        drawn = hashlib.shake_128(self.name + time).digest(4 * self.num_tokens)
        words = struct.unpack(f"<{self.num_tokens}I", drawn)
        return [word % FIRST_IMAGE_TOKEN + FIRST_IMAGE_TOKEN for word in words]

    def fits(self, token_side: int) -> bool:
        """Return whether it has the pixels of its tokens, whose side has `token_side` pixels."""
        return len(self.pixels) == self.frames * self.num_tokens * token_side**2 * _CHANNELS

    def may_follow(self, before: "Image | None") -> bool:
        """Return whether it continues no video, or the video of the previous image."""
        if self.time is None:
            return True
        return (
            before is not None
            and (before.end, before.frames) == (self.at, self.frames)
            and (before.rows, before.columns) == (self.rows, self.columns)
            and (before.time or 0) <= self.time < MAX_TOKENS
        )


def check_images(images: Sequence[Image], token_ids: Sequence[int]) -> None:
    """Check the images of a prompt.

    Raises:
        InvalidRequest: there are too many, or the prompt has other tokens at their positions, so
            that KV would be cached under another image's tokens.
    """
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(f"images: {len(images)} in one request, {MAX_IMAGES} allowed")
    num_bytes = sum(len(image.pixels) for image in images)
    if num_bytes > MAX_PIXEL_BYTES:
        raise InvalidRequest(f"images: {num_bytes} bytes of pixels, {MAX_PIXEL_BYTES} allowed")
    end = 0
    before: Image | None = None
    for number, image in enumerate(images):
        side = math.isqrt(
            len(image.pixels) // (_CHANNELS * max(image.num_tokens * image.frames, 1))
        )
        if not side or not image.fits(side):
            raise InvalidRequest(f"images[{number}]: the number of pixels does not match its size")
        if not image.may_follow(before):
            raise InvalidRequest(f"images[{number}]: it does not continue the video before it")
        if not end <= image.at or image.end > len(token_ids):
            raise InvalidRequest(f"images[{number}]: its tokens are outside the prompt")
        if list(token_ids[image.at : image.end]) != image.token_ids:
            raise InvalidRequest(
                f"images[{number}]: the prompt does not have its tokens at its position"
            )
        end, before = image.end, image


def from_proto(protos: Sequence[pb.Image]) -> tuple[Image, ...]:
    """Parse images. The caller must check them."""
    return tuple(
        Image(
            each.at,
            each.rows,
            each.columns,
            each.pixels,
            each.frames or 1,
            each.time if each.HasField("time") else None,
        )
        for each in protos
    )


def to_proto(images: Sequence[Image]) -> list[pb.Image]:
    return [pb.Image(**msgspec.structs.asdict(each)) for each in images]
