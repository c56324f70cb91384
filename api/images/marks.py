"""Placeholders of images and videos, if the chat template writes others than the model needs."""

from collections.abc import Sequence
from typing import TypeAlias

from api.images.picture import MediaInput, VideoInput
from api.images.videos import num_patches
from common.errors import InvalidRequest
from common.model_directory import VideoFiles


class SurroundedMarks:
    """Image placeholders between two tokens and blank lines, as in Gemma 3."""

    def __init__(self, names: Sequence[str]) -> None:
        begin, placeholder, end = names
        self._mark = begin
        self._whole = f"\n\n{begin}{placeholder}{end}\n\n"

    def written(self, text: str, media: Sequence[MediaInput]) -> str:
        """Return the rendered conversation with the model's placeholders.

        Raises:
            InvalidRequest: the number of placeholders in the text is not that of images or videos.
        """
        _check_places(text.count(self._mark), len(media), "images")
        return text.replace(self._mark, self._whole)


class VideoMarks:
    """Video placeholders: one for each temporal patch instead of the template's one per video.

    In some models each has a timestamp.

    Args:
        frames: number of frames of a temporal patch.
        names: texts of video.begin, video.placeholder and video.end.
    """

    def __init__(self, frames: int, video: VideoFiles, names: Sequence[str]) -> None:
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


# Replaces the chat template's placeholders of images or videos with those of the model.
MediaMarks: TypeAlias = SurroundedMarks | VideoMarks


def _check_places(num_places: int, num_inputs: int, inputs: str) -> None:
    if num_places != num_inputs:
        raise InvalidRequest(
            f"messages: the prompt has {num_places} placeholders for {num_inputs} {inputs}: a text "
            "must not contain the model's placeholder"
        )
