"""The temporal patches of a video: groups of a few frames that the encoder sees together."""

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import islice

from api.images.picture import Decoded, VideoInput
from common.errors import InvalidRequest
from common.model_directory import VisionFiles
from common.requests.images import Image

MIN_FPS, MAX_FPS = 0.01, 1000.0


def num_patches(video: VideoInput, frames: int) -> int:
    """Return the number of temporal patches, of `frames` frames each."""
    return math.ceil(len(video.sources) / frames)


def patches_of(
    decoded: Sequence[Decoded], fps: float, files: VisionFiles, max_positions: int
) -> Iterator[Image]:
    """Yield the temporal patches of a video, without positions in a prompt.

    The last frame is repeated to fill the last patch.

    Args:
        decoded: frames of the video.
        max_positions: limit on the time axis.

    Raises:
        InvalidRequest: frames differ in size, or the video is too long for the time axis.
    """
    video, count = files.video, files.frames
    assert video is not None
    sizes = {(frame.rows, frame.columns) for frame in decoded}
    if len(sizes) > 1:
        raise InvalidRequest("messages: the frames of a video differ in size")
    ((rows, columns),) = sizes
    interval = 0.0
    if video.positions_per_second is not None:
        interval = _single(video.positions_per_second * _single(count / fps))
    frames = iter(decoded)
    for number in range(math.ceil(len(decoded) / count)):
        shown = list(islice(frames, count))
        shown += [shown[-1]] * (count - len(shown))
        time = int(_single(number * interval))
        if time > max_positions:
            raise InvalidRequest(
                f"messages: a video of {len(decoded)} frames at fps {fps:g} takes more than the "
                f"{max_positions} positions left: send fewer frames, or a higher fps"
            )
        timed = number > 0 and video.positions_per_second is not None
        pixels = b"".join(frame.pixels for frame in shown)
        yield Image(0, rows, columns, pixels, count, time if timed else None)


def _single(number: float) -> float:
    """Return a number rounded to 32 bits, in which transformers computes positions."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
