"""Images and videos as a client sends them, and messages between a router and its image decoder."""

from collections.abc import Sequence

import msgspec

from common.model_directory import VisionFiles


class ImageInput(msgspec.Struct, frozen=True):
    source: str | bytes  # data:...;base64,... or a URL. bytes: the file
    low_detail: bool = False

    @property
    def sources(self) -> Sequence[str | bytes]:
        return (self.source,)


DEFAULT_FPS = 2.0  # as in qwen_vl_utils


class VideoInput(msgspec.Struct, frozen=True):
    """A video.

    Attributes:
        sources: its frames in order, each like an image's source.
        fps: frames per second.
    """

    sources: Sequence[str | bytes]
    fps: float


MediaInput = ImageInput | VideoInput


class ImageJob(msgspec.Struct, frozen=True):
    """An image, or a frame of a video, to be decoded and resized.

    Attributes:
        content: the file.
        is_base64: `content` is base64 of the file instead.
        max_tokens: a larger image is reduced to this size.
        tokens_left: an image with more tokens is rejected.
        num_frames: number of frames of its video. 0: it is an image.
    """

    content: bytes
    is_base64: bool
    files: VisionFiles
    max_tokens: int
    tokens_left: int
    num_frames: int = 0


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """An image at the model's size."""

    rows: int
    columns: int
    pixels: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The message of an InvalidRequest, as the result of an ImageJob."""

    sentence: str


Outcome = Decoded | Refused
