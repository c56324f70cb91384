"""Marks of images and videos in a prompt's text, and the temporal patches of videos.

A client sends the frames of a video. The encoder sees a few frames at a time, a temporal patch.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from api.images.picture import Decoded, MediaInput, VideoInput
from common.errors import InvalidRequest
from common.model_directory import VideoFiles, VisionFiles
from common.requests.images import Image

MIN_FPS, MAX_FPS = 0.01, 1000.0


class MediaMarks(Protocol):
    """Replaces the marks in a rendered conversation whose number or text differs from those that
    the model needs."""

    def written(self, text: str, media: Sequence[MediaInput]) -> str:
        """Return a conversation with the marks of all its images and videos.

        Raises:
            InvalidRequest: the text has more or fewer marks than there are images or videos.
        """
        ...


class SurroundedMarks:
    """Writer of images between two tokens and blank lines, as in Gemma 3."""

    def __init__(self, names: Sequence[str]) -> None:
        """
        Args:
            names: texts of the token before an image, of its placeholder, and of that after it.
        """
        begin, placeholder, end = names
        self._mark = begin
        self._whole = f"\n\n{begin}{placeholder}{end}\n\n"

    def written(self, text: str, media: Sequence[MediaInput]) -> str:
        _check_places(text.count(self._mark), len(media), "images")
        return text.replace(self._mark, self._whole)


class VideoMarks:
    """Writer of videos into rendered conversations. A chat template writes one mark for a video.
    The mark of each temporal patch takes its place, in some models with a timestamp."""

    def __init__(self, frames: int, video: VideoFiles, names: Sequence[str]) -> None:
        """
        Args:
            frames: of a temporal patch.
            names: texts of video.begin, video.placeholder and video.end.
        """
        begin, placeholder, end = names
        self._frames = frames
        self._timed = video.positions_per_second is None
        self._mark = begin + placeholder + end if self._timed else placeholder

    def written(self, text: str, media: Sequence[MediaInput]) -> str:
        videos = [each for each in media if isinstance(each, VideoInput)]
        if not videos:
            return text
        first, *others = text.split(self._mark)
        _check_places(len(others), len(videos), "videos")
        parts = (self._of(video) + rest for video, rest in zip(videos, others, strict=True))
        return first + "".join(parts)

    def _of(self, video: VideoInput) -> str:
        if not self._timed:
            return self._mark * num_patches(video, self._frames)
        last = len(video.sources) - 1
        starts = range(0, last + 1, self._frames)
        ends = (min(start + self._frames - 1, last) for start in starts)
        times = ((start + end) / 2 / video.fps for start, end in zip(starts, ends, strict=True))
        return "".join(f"<{time:.1f} seconds>{self._mark}" for time in times)


def _check_places(found: int, wanted: int, of_what: str) -> None:
    if found != wanted:
        raise InvalidRequest(
            f"messages: the prompt has {found} places for {wanted} {of_what}; a text may not have "
            "the model's own mark of one"
        )


def num_patches(video: VideoInput, frames: int) -> int:
    """Return the number of temporal patches.

    Args:
        frames: of a temporal patch.
    """
    return math.ceil(len(video.sources) / frames)


def patches_of(
    decoded: Sequence[Decoded], fps: float, files: VisionFiles, max_positions: int
) -> Iterator[Image]:
    """Yield the temporal patches of a video, without their positions in a prompt. The last frame is
    repeated to make the last patch whole.

    Args:
        decoded: its frames.
        max_positions: limit on the time axis.

    Raises:
        InvalidRequest: frames differ in size, or the video is too long for its axis of time.
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
