"""Conversion of all kinds of prompts to token ids: chat templates, tokenization, images.

Prompts that cannot fit are rejected before work: by bytes before a template is rendered or tokens
are counted, and by the number of tokens before the tokens are validated.
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import msgspec

from api.auth.client import Client
from api.images.marks import MediaMarks
from api.images.picture import ImageInput, MediaInput, VideoInput
from api.images.pictures import ImageLoader
from api.parsers import formats, harmony
from api.parsers.model_format import ModelFormat, ReasoningFormat
from api.requests.generate_params import (
    MAX_MESSAGES,
    MAX_SETTINGS_BYTES,
    ChatPrompt,
    ChatTurn,
    EmbeddingsPrompt,
    ModelLimits,
    NoPrompt,
    PastToolCall,
    PredictionPrompt,
    Prompt,
    PromptEnding,
    SharedPrompt,
    TextPairPrompt,
    TextPrompt,
    TokenIdsPrompt,
    check_length,
    check_prompt,
)
from api.text.chat_template import ChatTemplate, call_arguments
from api.text.tokenizer import RouterTokenizer, num_bytes
from common.errors import InvalidRequest, check_at_most
from common.request import GIVEN_TOKEN, InputEmbeddings
from common.requests.images import Image
from common.requests.sampling import GuidedDecoding, ReasoningTokens, as_form, tag

# Bytes of text for each token of the context. Longer text rarely fits, and encoding it as a whole
# could take a hundred times its bytes in memory.
_DOUBTFUL_BYTES_PER_TOKEN = 4
# Characters at the end of a rendered conversation, enough to contain how templates begin a
# response.
_END_CHARACTERS = 256


class PromptInputs(NamedTuple):
    """The inputs of the first layer: token ids, some of which stand for images or embeddings."""

    token_ids: Sequence[int]
    images: Sequence[Image]
    embeddings: InputEmbeddings | None


class PromptEncoder:
    """Converts prompts to token ids. For one event loop.

    Args:
        model_format: the model's format of reasoning and tool calls.
        pictures: loader of images. None: the model does not support images.
        marks: None: the chat template already writes the model's placeholders.
    """

    def __init__(
        self,
        tokenizer: RouterTokenizer,
        chat_template: ChatTemplate | None,
        limits: ModelLimits,
        model_format: ModelFormat,
        pictures: ImageLoader | None = None,
        marks: MediaMarks | None = None,
    ) -> None:
        self._pictures = pictures
        self._marks = marks
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._limits = limits
        self._model_format = model_format
        opens, closes = map(tokenizer.token_of, formats.THOUGHT)
        # Markers that consist of several tokens cannot be found among token ids.
        self._markers = None if opens is None or closes is None else (opens, closes)

    def close(self) -> None:
        """Stop the image decoder's helper process."""
        if self._pictures is not None:
            self._pictures.close()

    async def checked(self, prompt: Prompt, client: Client) -> Sequence[int]:
        """Return token ids that are in the vocabulary and leave room for a response.

        Args:
            client: client whose image decoding turns are used.

        Raises:
            InvalidRequest: there is no prompt, the model does not support its form, or it does not
                fit.
            Overloaded: too much text waits to be tokenized, or too many images to be decoded.
            NodeUnavailable: see Decoding.decoded.
        """
        token_ids = await self.encode(prompt, client)
        check_prompt(token_ids, self._limits, prompt.field)
        return token_ids

    async def inputs(self, shared: SharedPrompt, client: Client) -> PromptInputs:
        """Return the inputs of a prompt, and set its rendering. Raises as `checked` does."""
        images: Sequence[Image] = ()
        embeddings = None
        match shared.prompt:
            case ChatPrompt() as messages:
                text = self._render(messages)
                shared.rendering.end = text[-_END_CHARACTERS:]
                token_ids, images = await self._conversation(messages, text, client)
                if not images:
                    check_prompt(token_ids, self._limits, messages.field)
            case EmbeddingsPrompt(values=values, num_tokens=num_tokens) as given:
                token_ids = await self.encode(given, client)
                embeddings = InputEmbeddings.of(values, num_tokens)
            case prompt:
                token_ids = await self.checked(prompt, client)
        shared.rendering.num_tokens = len(token_ids)
        return PromptInputs(token_ids, images, embeddings)

    def may_think(self, prompt: Prompt) -> bool:
        """Return whether nodes can separate reasoning from content for such a prompt."""
        known = self._model_format.marks_thought and self._markers is not None
        return known and isinstance(prompt, ChatPrompt)

    def thought(self, prompt: SharedPrompt) -> ReasoningTokens | None:
        """Return the delimiters of the reasoning with which a response to a prompt may begin.

        None: there is no reasoning, or nodes cannot detect it.
        """
        if self._markers is None or not self.may_think(prompt.prompt):
            return None
        opens, closes = self._markers
        match self._model_format.thinks(prompt.rendering.end):
            case ReasoningFormat.NOT:
                return None
            case ReasoningFormat.PERHAPS:
                return ReasoningTokens(closes, opens)
            case ReasoningFormat.AT_ONCE:
                return ReasoningTokens(closes)

    def guide(self, prompt: SharedPrompt, guide: GuidedDecoding) -> GuidedDecoding:
        """Return the guide of a response whose content has this form, with optional reasoning."""
        channels = self._model_format.channels
        if channels is None or not harmony.is_open(prompt.rendering.end):
            return guide
        form = as_form(guide)
        return guide if form is None else tag(channels.final(form))

    async def text_of(self, prompt: Prompt, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens of a prompt. Raise Overloaded if too much text waits."""
        match prompt:
            case TextPrompt():
                return prompt.text
            case _:
                return await self._tokenizer.decode_any(list(token_ids))

    async def words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences with which each word may be written.

        A word may be at the start of a response or after a space.

        Raises:
            Overloaded: too much text waits to be tokenized.
        """
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        written = dict.fromkeys(map(tuple, await self._tokenizer.encode_all(texts)))
        written.pop((), None)
        return tuple(written)

    async def encode(self, prompt: Prompt, client: Client) -> Sequence[int]:
        """Return token ids, possibly none or outside the vocabulary. Raises as `checked` does."""
        match prompt:
            case TextPrompt():
                return await self._encode(
                    prompt.text, prompt.field, add_special_tokens=prompt.add_special_tokens
                )
            case TextPairPrompt(first=first, second=second):
                await self._check_size(first + second, prompt.field)
                token_ids = await self._tokenizer.encode_pair(first, second)
                check_length(token_ids, self._limits, prompt.field)
                return token_ids
            case TokenIdsPrompt():
                check_length(prompt.token_ids, self._limits, prompt.field)
                return list(prompt.token_ids)
            case ChatPrompt():
                said, _ = await self._conversation(prompt, self._render(prompt), client)
                return said
            case EmbeddingsPrompt(num_tokens=num_tokens):
                check_length(range(num_tokens), self._limits, prompt.field)
                return [GIVEN_TOKEN] * num_tokens
            case PredictionPrompt(text=text):
                return await self._encode(text, prompt.field, add_special_tokens=False)
            case NoPrompt():
                raise InvalidRequest(f"prompt is missing: set one of {', '.join(prompt.one_of)}")

    async def _conversation(
        self, messages: ChatPrompt, text: str, client: Client
    ) -> tuple[Sequence[int], Sequence[Image]]:
        """Return a conversation's token ids, including those of its images, and the images.

        Args:
            text: the rendered conversation.
        """
        if messages.media:
            text = self._with_marks(messages.media, text)
        token_ids = await self._encode(text, messages.field, add_special_tokens=False)
        if not messages.media:
            return token_ids, ()
        check_prompt(token_ids, self._limits, messages.field)  # clients must not send image tokens
        token_ids, images = await self._with_images(messages, token_ids, client)
        check_length(token_ids, self._limits, messages.field)
        return token_ids, images

    def _with_marks(self, media: Sequence[MediaInput], text: str) -> str:
        """Return a rendered conversation with the placeholders of its images and videos.

        Raises:
            InvalidRequest: the model does not support them, or there are too many.
        """
        if self._pictures is None:
            raise InvalidRequest("messages: this model does not support images, only text")
        self._pictures.check_numbers(media)
        return text if self._marks is None else self._marks.written(text, media)

    async def _with_images(
        self, messages: ChatPrompt, token_ids: Sequence[int], client: Client
    ) -> tuple[Sequence[int], Sequence[Image]]:
        assert self._pictures is not None
        left = self._limits.context_length - len(token_ids)
        images = await self._pictures.read(messages.media, left, client)
        return self._pictures.placed(token_ids, images)

    async def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> Sequence[int]:
        await self._check_size(text, field)
        token_ids = await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        check_length(token_ids, self._limits, field)
        return token_ids

    async def _check_size(self, text: str, field: str) -> None:
        """Reject text that cannot fit, before it is encoded. Raise InvalidRequest or Overloaded."""
        context, size = self._limits.context_length, num_bytes(text)
        if size > self._limits.text_bytes:
            raise InvalidRequest(
                f"{field} has {size} bytes of text; the context of {context} tokens accepts "
                f"at most {self._limits.text_bytes}"
            )
        if size > context * _DOUBTFUL_BYTES_PER_TOKEN and await self._tokenizer.surely_exceeds(
            text, context
        ):
            raise InvalidRequest(
                f"{field} has more than {context} tokens; the context of {context} tokens "
                f"accepts prompts of at most {context - 1}"
            )

    def _render(self, messages: ChatPrompt) -> str:
        if self._chat_template is None:
            raise InvalidRequest("messages: this model has no chat template: send text instead")
        check_conversation(messages, self._chat_template, self._limits.text_bytes)
        return render_conversation(messages, self._chat_template, self._limits.text_bytes)


_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # names that templates use
# Marks the end of the last turn in the rendered text. Removed before tokenization.
_CUT = "\x00baton: cut here\x00"


def check_conversation(messages: ChatPrompt, template: ChatTemplate, max_bytes: int) -> None:
    """Check a conversation before it is rendered.

    Args:
        max_bytes: limit of the text.

    Raises:
        InvalidRequest: the template does not support it, or it has too much text.
    """
    if not messages.turns:
        raise InvalidRequest("messages must have at least one message")
    check_at_most("messages", len(messages.turns), "messages", MAX_MESSAGES)
    tools, settings = (len(msgspec.json.encode(x)) for x in (messages.tools, messages.settings))
    check_at_most("chat_template_kwargs", settings, "bytes", MAX_SETTINGS_BYTES)
    size = sum(num_bytes(text) for turn in messages.turns for text in _texts(turn))
    size += tools if messages.tools else 0
    if size > max_bytes:
        raise InvalidRequest(
            f"messages has {size} bytes of text: the context accepts at most {max_bytes}"
        )
    if messages.tools and not template.takes_tools:
        raise InvalidRequest("tools: this model's chat template does not support them")
    for name in messages.settings:
        if name not in template.settings:
            raise InvalidRequest(_unknown_setting(name, template))
    if messages.reasoning_effort is not None and "reasoning_effort" not in template.settings:
        raise InvalidRequest("reasoning_effort: this model's chat template does not use it")
    for number, turn in enumerate(messages.turns):
        if not turn.role:
            raise InvalidRequest(f"messages[{number}].role is empty")
        if turn.tool_calls and "tool_calls" not in template.source:
            raise InvalidRequest(
                f"messages[{number}].tool_calls: this model's chat template does not support them"
            )


def render_conversation(messages: ChatPrompt, template: ChatTemplate, max_characters: int) -> str:
    """Return the prompt of a conversation that `check_conversation` has accepted.

    Raises:
        InvalidRequest: the template rejects it, or its prompt is too long.
    """
    reasoning = next((name for name in _REASONING_NAMES if name in template.source), "")
    turns = [_as_templates_know_it(turn, reasoning) for turn in messages.turns]
    settings = dict(messages.settings)
    if messages.reasoning_effort is not None:
        settings["reasoning_effort"] = messages.reasoning_effort
    continued = messages.ending is PromptEnding.CONTINUED
    if continued:
        turns[-1]["content"] = _with_cut(turns[-1]["content"])
    text = template.render(
        turns,
        tools=messages.tools,
        settings=settings,
        opens=messages.ending is PromptEnding.OPENED,
        max_characters=max_characters,
    )
    if not continued:
        return text
    before, cut, _ = text.rpartition(_CUT)
    if not cut:
        raise InvalidRequest(
            "continue_final_message: the model's chat template omits the last message"
        )
    return before


def _as_templates_know_it(turn: ChatTurn, reasoning: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.parts:
        message["content"] = [_part(part) for part in turn.parts]
    elif turn.content is None and not turn.tool_calls:
        message["content"] = ""  # templates concatenate it with text
    if turn.name is not None:
        message["name"] = turn.name
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if turn.reasoning and reasoning:
        message[reasoning] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call_arguments(call.arguments),
                },
            }
            for call in turn.tool_calls
        ]
    return message


def _with_cut(content: str | list[dict[str, str]] | None) -> str | list[dict[str, str]]:
    """Return this content with the mark at its end, in its last part if it has parts."""
    if not isinstance(content, list):
        return f"{content or ''}{_CUT}"
    *before, last = content
    if "text" not in last:
        return [*content, {"type": "text", "text": _CUT}]
    return [*before, {**last, "text": f"{last['text']}{_CUT}"}]


def _part(part: str | MediaInput) -> dict[str, str]:
    match part:
        case ImageInput():
            return {"type": "image"}
        case VideoInput():
            return {"type": "video"}
        case text:
            return {"type": "text", "text": text}


def _texts(turn: ChatTurn) -> Iterator[str]:
    """Yield all texts that a turn adds to the prompt."""
    yield turn.role
    yield from (part for part in turn.parts if isinstance(part, str))
    for text in (turn.content, turn.name, turn.reasoning, turn.tool_call_id):
        if text is not None:
            yield text
    for call in turn.tool_calls:
        yield from _texts_of(call)


def _texts_of(call: PastToolCall) -> tuple[str, ...]:
    return call.id, call.name, call.arguments


def _unknown_setting(name: str, template: ChatTemplate) -> str:
    close = get_close_matches(name, template.settings, 1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    return f"chat_template_kwargs: this model's chat template has no variable {name[:40]!r}{guess}"
