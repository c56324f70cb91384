"""A conversation in OpenAI's format: messages, tools and chat template settings.

The template settings are those of vLLM and SGLang.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec

from api.dialect.bodies import Ignored, Nothing
from api.dialect.problems import invalid
from api.images.picture import DEFAULT_FPS, ImageInput, MediaInput, VideoInput
from api.requests.generate_params import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatPrompt,
    ChatTurn,
    PastToolCall,
    PromptEnding,
)
from common.limits import MAX_FRAMES


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class VideoUrl(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content. Its type determines its fields.

    Attributes:
        video: frames of a video, as `url`s of images.
        fps: frames per second of a video.
    """

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None
    video: Annotated[list[str], msgspec.Meta(max_length=MAX_FRAMES)] | None = None
    video_url: VideoUrl | None = None
    fps: float | None = None
    annotations: Ignored = None
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class AssistantFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = ""


class AssistantToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of an earlier message."""

    function: AssistantFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: Ignored = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message. Clients that send back a response set some fields to null."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Ignored = None
    cache_control: Ignored = None
    id: Ignored = None
    provider_specific_fields: Ignored = None
    audio: Nothing = None
    function_call: Nothing = None
    refusal: Nothing = None


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ToolFunction
    cache_control: Ignored = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The one tool that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"

    @property
    def name(self) -> str:
        return self.function.name


MessageList = Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)]
ToolList = Annotated[list[ToolDefinition], msgspec.Meta(max_length=MAX_TOOLS)]


class ConversationFields(Protocol):
    """Request fields about a conversation. Absent and null mean the same."""

    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def conversation(
    fields: ConversationFields, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]
) -> ChatPrompt:
    """Return the conversation in a request.

    Args:
        tools: tools that the model may use, in the format of chat templates.

    Raises:
        ApiError: a message is empty, has parts that are not supported, or both endings are
            requested.
    """
    return ChatPrompt(
        [_turn(number, message) for number, message in enumerate(messages)],
        tools,
        fields.chat_template_kwargs or {},
        fields.reasoning_effort,
        _ending(fields),
    )


def shown(function: ToolFunction) -> dict[str, Any]:
    """Return a tool in the format of chat templates."""
    schema: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        schema["description"] = function.description
    schema["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": schema}


def _ending(fields: ConversationFields) -> PromptEnding:
    if fields.continue_final_message:
        if fields.add_generation_prompt:
            raise invalid("continue_final_message", "cannot be combined with add_generation_prompt")
        return PromptEnding.CONTINUED
    return PromptEnding.CLOSED if fields.add_generation_prompt is False else PromptEnding.OPENED


def _turn(number: int, message: ChatMessage) -> ChatTurn:
    where = f"messages[{number}]"
    calls = tuple(
        PastToolCall(call.function.name, call.function.arguments, call.id)
        for call in message.tool_calls or ()
    )
    content: str | None = None
    parts: Sequence[str | MediaInput] = ()
    if isinstance(message.content, list) and any(part.type in _MEDIA for part in message.content):
        parts = tuple(_part(f"{where}.content", *each) for each in enumerate(message.content))
    elif message.content is not None:
        content = text_of(f"{where}.content", message.content)
    elif message.role != "assistant":
        raise invalid(f"{where}.content", "must be text or a list of text parts")
    return ChatTurn(
        # `developer` is OpenAI's newer name. Templates know the older one.
        role="system" if message.role == "developer" else message.role,
        content=content,
        parts=parts,
        name=message.name,
        reasoning=message.reasoning_content or message.reasoning,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
    )


_MEDIA = frozenset({"image_url", "video", "video_url"})
_FRAME_LIST = "data:video/jpeg;base64,"  # vLLM's form of a video: JPEG frames separated by commas


def _part(where: str, number: int, part: ContentPart) -> str | MediaInput:
    fps = DEFAULT_FPS if part.fps is None else part.fps
    match part:
        case ContentPart(type="image_url", image_url=ImageUrl() as image):
            return ImageInput(image.url, image.detail == "low")
        case ContentPart(type="video", video=list(frames)):
            return VideoInput(frames, fps)
        case ContentPart(type="video_url", video_url=VideoUrl(url=url)):
            return VideoInput(_frames(f"{where}[{number}].video_url.url", url), fps)
        case _:
            return text_of(where, [part], number)


def _frames(where: str, url: str) -> Sequence[str]:
    """Return the frames of a video as `url`s of images. Raise ApiError for any other content."""
    if not url.startswith(_FRAME_LIST):
        raise invalid(
            where,
            "is not a list of frames, and video files are not decoded: send "
            '{"type": "video", "video": ["data:image/jpeg;base64,...", ...], "fps": 2}, or '
            "data:video/jpeg;base64,FRAME,FRAME,... as the URL",
        )
    if url.count(",") > MAX_FRAMES:
        raise invalid(where, f"has {url.count(',')} frames, {MAX_FRAMES} allowed")
    frames = url.removeprefix(_FRAME_LIST).split(",")
    return [f"data:image/jpeg;base64,{frame}" for frame in frames]


def text_of(where: str, content: str | list[ContentPart], first: int = 0) -> str:
    """Return the text of a message's content.

    Args:
        where: path of the content, for errors.
        first: index of the first part.

    Raises:
        ApiError: a part is not text. The error names its path.
    """
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content, first):
        if part.type != "text" or part.text is None:
            raise invalid(f"{where}[{number}]", "is not text: only text is supported")
        texts.append(part.text)
    return "\n".join(texts)
