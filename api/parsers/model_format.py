"""Detection of a model's format of reasoning and tool calls, and choice of parser and grammar."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

import msgspec

from api.parsers import formats, harmony
from api.parsers.formats import one_of
from api.parsers.harmony import Channels
from api.parsers.source import GrammarParser, ParserSource, Steps
from api.parsers.tags import TOOL_FORMATS, call_forms, grouped

# JSON schema of the arguments of each tool by name.
Tools = Mapping[str, Any]

NONE = "none"
# Grammars for arguments of optional calls: free text, any JSON object, the tool's schema.
FREE, JSON, SCHEMA = "free", "json", "schema"
_HARMONY = "harmony"
# Markers in a chat template that identify its format, first match first. Templates contain markers
# in order to show earlier calls. Llama 3 templates may have only the marker of the chat format.
_SHOWN_BY: Sequence[tuple[str, str]] = (
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    (formats.DEEPSEEK[0], "deepseek"),
    ("<function=", "qwen3-coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>", "llama3"),
)


class ReasoningFormat(Enum):
    """The beginning of a response: with or without reasoning."""

    NOT = auto()
    PERHAPS = auto()  # the response itself decides
    AT_ONCE = auto()  # the prompt has opened the reasoning


class ModelFormat(msgspec.Struct, frozen=True):
    """A model's format of reasoning and tool calls. NONE: it has none, or it is unknown.

    Attributes:
        tokens: markers that are special tokens. The same text in other tokens is not a marker.
        arguments: FREE, JSON or SCHEMA: default grammar of arguments.
        takes_effort: the chat template supports a reasoning effort.
        takes_budget: nodes can end reasoning after a number of tokens.
        shown: special tokens that a response's text keeps, without and with tool calls.
    """

    reasoning: str = NONE  # | "deepseek-r1" | "qwen3" | "harmony"
    tools: str = NONE  # | "hermes" | "llama3" | "mistral" | "deepseek" | "qwen3-coder" | "glm45" |
    # "harmony"
    tokens: Mapping[str, int] = {}
    arguments: str = JSON
    takes_effort: bool = False
    takes_budget: bool = False
    shown: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    def markers(self, *, calls: bool) -> frozenset[str]:
        """Return texts that a response must keep although they may be special tokens.

        Args:
            calls: the response may call tools.
        """
        if self._is_harmony:
            return frozenset({*harmony.MARKERS, *harmony.ENDS})
        found: set[str] = set() if self.reasoning == NONE else {*formats.THOUGHT}
        if calls and self.tools in TOOL_FORMATS:
            found |= set(TOOL_FORMATS[self.tools].markers)
        return frozenset(found)

    def form_of_calls(
        self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, parallel: bool
    ) -> Mapping[str, Any] | None:
        """Return a structural tag format: free text in which each call is complete.

        None: no grammar can write this model's calls.

        Args:
            tools: names, with the schemas of their arguments.
            parallel: False: nothing follows a call.
        """
        if self.tools == _HARMONY and self.channels is not None:
            return self.channels.free(tools, parallel=parallel)
        calls = call_forms(self.tools, self.tokens)
        return None if calls is None else calls.in_text(grouped(tools), parallel=parallel)

    def form_of_calls_or(
        self,
        form: Mapping[str, Any],
        tools: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        parallel: bool,
    ) -> Mapping[str, Any] | None:
        """Return a structural tag format: a response of this format, or calls alone.

        None: no grammar can write this model's calls.

        Args:
            tools, parallel: see `form_of_calls`.
        """
        if self.tools == _HARMONY and self.channels is not None:
            return self.channels.calls_or(form, tools, parallel=parallel)
        calls = call_forms(self.tools, self.tokens)
        if calls is None:
            return None
        return one_of(form, calls.alone(grouped(tools), parallel=parallel))

    @property
    def channels(self) -> Channels | None:
        """Return the Harmony channels to which responses can be constrained.

        None: the model has no channels, or their markers are plain text, which reasoning might
        contain.
        """
        known = self._is_harmony and self.tokens.keys() >= {*harmony.MARKERS, harmony.END}
        return Channels(self.tokens) if known else None

    @property
    def _is_harmony(self) -> bool:
        return _HARMONY in (self.reasoning, self.tools)

    @property
    def marks_thought(self) -> bool:
        """Return whether reasoning is marked at the start of a response."""
        return self.reasoning not in (NONE, _HARMONY)

    def thinks(self, rendered_end: str) -> ReasoningFormat:
        """Return how a response begins after a prompt with this end."""
        end = rendered_end.rstrip()
        if not self.marks_thought or end.endswith(formats.THINK_CLOSE):
            return ReasoningFormat.NOT
        opened = self.reasoning == "deepseek-r1" or end.endswith(formats.THINK_OPEN)
        return ReasoningFormat.AT_ONCE if opened else ReasoningFormat.PERHAPS

    def parser(self, rendered_end: str, tools: Tools | None, *, reasons: bool) -> GrammarParser:
        """Return the parser of one response.

        Args:
            rendered_end: end of the prompt's text.
            tools: tools that the response may call. None: no tools.
            reasons: reasoning is returned.
        """
        if self._is_harmony:
            grammar = partial(harmony.harmony, reasons=reasons, calls=tools is not None)
            return GrammarParser(grammar, self.tokens)
        return self._behind_thought(self._calls(tools), rendered_end, reasons=reasons)

    def parser_of_calls(
        self, rendered_end: str, tools: Tools | None, *, reasons: bool
    ) -> GrammarParser:
        """Return the parser of a response that a grammar restricts to calls.

        Args:
            tools: see `parser`.
        """
        if self.channels is not None:
            return self.parser(rendered_end, tools, reasons=reasons)
        return self._behind_thought(formats.forced, rendered_end, reasons=reasons)

    def _behind_thought(
        self, then: Callable[[ParserSource], Steps[None]], rendered_end: str, *, reasons: bool
    ) -> GrammarParser:
        thinks = self.thinks(rendered_end)
        if thinks is ReasoningFormat.NOT:
            return GrammarParser(then, self.tokens)
        opened = thinks is ReasoningFormat.AT_ONCE
        grammar = partial(formats.think, then=then, opened=opened, reasons=reasons)
        return GrammarParser(grammar, self.tokens)

    def _calls(self, tools: Tools | None) -> Callable[[ParserSource], Steps[None]]:
        """Return the grammar of a response without reasoning."""
        if tools is None or self.tools not in TOOL_FORMATS:
            return formats.plain
        parse = TOOL_FORMATS[self.tools].parse
        return lambda source: parse(source, tools)


def detect_format(template: str, reasoning: str, tools: str) -> ModelFormat:
    """Return a model's format of reasoning and tool calls.

    Args:
        template: source of the model's chat template, or "".
        reasoning, tools: a format, NONE, or "auto" to detect it in the template.
    """
    shown = _shown_by(template)
    return ModelFormat(
        shown.reasoning if reasoning == "auto" else reasoning,
        shown.tools if tools == "auto" else tools,
    )


def _shown_by(template: str) -> ModelFormat:
    tools = next((name for marker, name in _SHOWN_BY if marker in template), NONE)
    if tools == _HARMONY:
        return ModelFormat(_HARMONY, _HARMONY)
    return ModelFormat("qwen3" if formats.THINK_CLOSE in template else NONE, tools)
