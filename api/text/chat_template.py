"""Rendering of conversations with the model's chat template.

A template is code that is part of the model. It runs in jinja2's sandbox, with the helpers that
common templates use.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequest

MAX_VALUES = 1 << 16  # values in JSON that is written in a text


# Any text is accepted, because models write invalid calls and clients send them back.
class CallArguments(dict[str, Any]):
    """Arguments of an earlier call. Some templates print them as an object, others as text.

    Attributes:
        verbatim: the text, if it is not a JSON object. Templates that print an object print this
            text. Templates that print each argument print it as an argument called "arguments".
    """

    def __init__(self, text: str, values: Mapping[str, Any] | None) -> None:
        super().__init__({"arguments": text} if values is None else values)
        self._text = text
        self.verbatim = text if values is None else None

    def __str__(self) -> str:
        return self._text

    def __add__(self, text: str) -> str:
        return self._text + text

    def __radd__(self, text: str) -> str:
        return text + self._text


def call_arguments(text: str) -> CallArguments:
    """Return the arguments of a call from any text. "" is an empty object."""
    text = text or "{}"
    # A value costs more than its bytes, and the limit for the body does not count values in a text.
    if sum(map(text.count, "[{,")) > MAX_VALUES:
        return CallArguments(text, None)
    try:
        values = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return CallArguments(text, None)
    return CallArguments(text, values if isinstance(values, dict) else None)


# Errors that a template can raise for messages that it does not support.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training. Here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012  (the name and type are jinja2's)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile a template. Raise ConfigError if `source` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            named = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"model: its chat template cannot be read: {error}") from error
        self._special_tokens = special_tokens
        self.source = source
        self.takes_tools = "tools" in named
        self.settings = named - _GIVEN - environment.globals.keys() - special_tokens.keys()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        settings: Mapping[str, Any] | None = None,
        opens: bool = True,
        max_characters: int,
    ) -> str:
        """Return the prompt, with all special tokens as text.

        Args:
            messages: objects with "role", "content" and other fields of Hugging Face templates.
            tools: tools that the model may call, in OpenAI's form. Only if the template
                `takes_tools`.
            settings: values for variables of the template, named in `self.settings`.
            opens: the prompt ends with the beginning of the assistant's next message.
            max_characters: limit of the prompt. Rendering stops beyond it.

        Raises:
            InvalidRequest: the template rejects these messages, or the prompt is too long.
        """
        try:
            pieces = self._template.generate(
                messages=messages,
                add_generation_prompt=opens,
                tools=tools or None,
                documents=None,
                **self._special_tokens,
                **(settings or {}),
            )
            return _joined(pieces, max_characters)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"messages: refused by the model's chat template: {error}"
            ) from error


def _joined(pieces: Iterable[str], max_characters: int) -> str:
    kept = []
    num_characters = 0
    for piece in pieces:
        kept.append(piece)
        num_characters += len(piece)
        if num_characters > max_characters:
            raise InvalidRequest(
                f"messages: rendered they have more than {max_characters} characters, "
                "which exceeds the context"
            )
    return "".join(kept)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    if isinstance(value, CallArguments) and value.verbatim is not None:
        return value.verbatim
    # jinja2's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
