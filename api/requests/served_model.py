"""A served model as the router has it: tokenizer, chat template and formats, from its files.

`ByModel` finds the parts of one of several models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec.structs import replace

from api.images.marks import MediaMarks, SurroundedMarks, VideoMarks
from api.images.pictures import ImageLoader
from api.parsers import formats
from api.parsers.model_format import ModelFormat, detect_format
from api.requests.generate_params import ModelLimits
from api.requests.prompts import PromptEncoder
from api.text.chat_template import ChatTemplate
from api.text.model_files import ModelFiles
from api.text.tokenizer import RouterTokenizer
from common.config import ImagesConfig
from common.errors import InvalidRequest, NotFound
from common.model_directory import VideoFiles, VisionFiles

T = TypeVar("T")


class ByModel(Generic[T]):
    """One part of each served model, such as its gRPC service, by the model's name."""

    def __init__(self, parts: Mapping[str, T]) -> None:
        self._parts = parts

    def of(self, model: str | None) -> T:
        """Return the part of a model. None or "": the only one.

        Raises:
            NotFound: no served model has this name.
            InvalidRequest: it is empty, and there are several models.
        """
        if model:
            if (part := self._parts.get(model)) is None:
                raise NotFound(f"model: there is no {model[:256]!r} here; served: {self._names}")
            return part
        if len(self._parts) > 1:
            raise InvalidRequest(f"model: is required, because several are served: {self._names}")
        return next(iter(self._parts.values()))

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._parts))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model."""

    files: ModelFiles
    tokenizer: RouterTokenizer
    limits: ModelLimits
    prompts: PromptEncoder
    model_format: ModelFormat


def served_model(
    files: ModelFiles,
    reasoning_parser: str = "auto",
    tool_parser: str = "auto",
    images: ImagesConfig | None = None,
    tool_arguments: str = "json",
) -> ServedModel:
    """Make the served model from its files.

    Args:
        reasoning_parser, tool_parser, images, tool_arguments: see RouterConfig.

    Raises:
        ConfigError: the tokenizer or chat template cannot be used.
    """
    tokenizer = RouterTokenizer(files.tokenizer_json)
    template = (
        ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
    )
    limits = ModelLimits(
        files.context_length,
        files.vocabulary_size,
        tokenizer.longest_token_bytes,
        sees_images=files.vision is not None,
    )
    model_format = detect_format(files.chat_template or "", reasoning_parser, tool_parser)
    tokens = tokenizer.special(model_format.markers(calls=True))
    marked = None not in map(tokenizer.token_of, formats.THOUGHT)
    model_format = replace(
        model_format,
        tokens=tokens,
        arguments=tool_arguments,
        takes_effort=template is not None and "reasoning_effort" in template.settings,
        takes_budget=model_format.marks_thought and marked,
        shown=(
            _shown(model_format, tokenizer, calls=False),
            _shown(model_format, tokenizer, calls=True),
        ),
    )
    pictures = None if files.vision is None else ImageLoader(files.vision, images or ImagesConfig())
    marks = _marks(files.vision, tokenizer)
    prompts = PromptEncoder(tokenizer, template, limits, model_format, pictures, marks)
    return ServedModel(files, tokenizer, limits, prompts, model_format)


def _shown(model_format: ModelFormat, tokenizer: RouterTokenizer, *, calls: bool) -> frozenset[int]:
    return frozenset(tokenizer.special(model_format.markers(calls=calls)).values())


def _marks(files: VisionFiles | None, tokenizer: RouterTokenizer) -> MediaMarks | None:
    """Return None if the chat template writes all placeholders, or the tokenizer lacks them.

    Without tokens, media are rejected because they have no place in the prompt.
    """
    match files:
        case VisionFiles(surrounded=(begin, end)):
            names = tokenizer.names((begin, files.placeholder, end))
            return SurroundedMarks(names) if all(names) else None
        case VisionFiles(video=VideoFiles() as video):
            names = tokenizer.names((video.begin, video.placeholder, video.end))
            return VideoMarks(files.frames, video, names) if all(names) else None
        case _:
            return None
