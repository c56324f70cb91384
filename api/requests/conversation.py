"""A conversation in the form of chat templates, validated before any work.

Clients send JSON, but templates expect the input of Hugging Face's tokenizers. A call's arguments
are an object where the client sent text. Reasoning has the name that the template uses.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import msgspec

from api.images.picture import ImageInput
from api.requests.generate_params import ChatPrompt, ChatTurn, PastToolCall, PromptEnding
from api.text.call_arguments import call_arguments
from api.text.chat_template import ChatTemplate
from api.text.limits import MAX_MESSAGES, MAX_SETTINGS_BYTES
from api.text.tokenizer import num_bytes
from common.errors import InvalidRequest

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # names in templates
# Marks the end of the last turn in the rendered text. It is removed before tokenisation.
_CUT = "\x00baton: cut here\x00"


def check(messages: ChatPrompt, template: ChatTemplate, max_bytes: int) -> None:
    """Check a conversation before it is rendered.

    Args:
        max_bytes: limit of the text.

    Raises:
        InvalidRequest: the template does not support it, or it has too much text.
    """
    if not messages.turns:
        raise InvalidRequest("messages must have at least one message")
    if len(messages.turns) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages.turns)} messages, {MAX_MESSAGES} allowed")
    tools, settings = (len(msgspec.json.encode(x)) for x in (messages.tools, messages.settings))
    if settings > MAX_SETTINGS_BYTES:
        raise InvalidRequest(
            f"chat_template_kwargs has {settings} bytes, {MAX_SETTINGS_BYTES} allowed"
        )
    size = sum(num_bytes(text) for turn in messages.turns for text in _texts(turn))
    size += tools if messages.tools else 0
    if size > max_bytes:
        raise InvalidRequest(
            f"messages has {size} bytes of text; the context takes at most {max_bytes}"
        )
    if messages.tools and not template.takes_tools:
        raise InvalidRequest("tools: this model's chat template has no place for them")
    for name in messages.settings:
        if name not in template.settings:
            raise InvalidRequest(_unknown_setting(name, template))
    if messages.reasoning_effort is not None and "reasoning_effort" not in template.settings:
        raise InvalidRequest("reasoning_effort: this model's chat template has no such setting")
    for number, turn in enumerate(messages.turns):
        if not turn.role:
            raise InvalidRequest(f"messages[{number}].role is empty")
        if turn.tool_calls and "tool_calls" not in template.source:
            raise InvalidRequest(
                f"messages[{number}].tool_calls: this model's chat template has no place for them"
            )


def rendered(messages: ChatPrompt, template: ChatTemplate, max_characters: int) -> str:
    """Return the prompt of a conversation that `check` has accepted.

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
        turns[-1]["content"] = f"{turns[-1]['content'] or ''}{_CUT}"
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
            "continue_final_message: the model's chat template leaves the last message out"
        )
    return before


def _as_templates_know_it(turn: ChatTurn, reasoning: str) -> dict[str, Any]:
    told: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.parts:
        told["content"] = [_part(part) for part in turn.parts]
    elif turn.content is None and not turn.tool_calls:
        told["content"] = ""  # templates concatenate it with text
    if turn.name is not None:
        told["name"] = turn.name
    if turn.tool_call_id is not None:
        told["tool_call_id"] = turn.tool_call_id
    if turn.reasoning and reasoning:
        told[reasoning] = turn.reasoning
    if turn.tool_calls:
        told["tool_calls"] = [
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
    return told


def _part(part: str | ImageInput) -> dict[str, str]:
    return {"type": "image"} if isinstance(part, ImageInput) else {"type": "text", "text": part}


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
    return f"chat_template_kwargs: this model's chat template has no setting {name[:40]!r}{guess}"
