"""Tool calls as structural tags, for each format.

A response of calls only and free text with calls use the same blocks. In free text, a call that has
begun can only continue as a complete call of an offered tool.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from api.parsers import formats, marked
from api.parsers.formats import (
    ANYTHING,
    DEEPSEEK,
    HERMES,
    LLAMA3,
    MISTRAL,
    SPACE,
    Format,
    Forms,
    Grammar,
    one_of,
    optional,
    plus,
    schema_form,
    star,
)
from api.parsers.marked import GLM45, QWEN3_CODER

# Names of tools whose arguments have the same schema, and that schema.
Group = tuple[Sequence[str], Mapping[str, Any]]

_MISTRAL_ID: Format = {"type": "regex", "pattern": "[a-zA-Z0-9]{9}"}
_FENCE_BEGIN, _FENCE_END = "\n```json\n", "\n```"  # around arguments, in DeepSeek V3 and R1


class Block(msgspec.Struct, frozen=True):
    """One call, or several that share their markers.

    Attributes:
        begin: text or marker with which only this block may begin.
        end: text or marker at the end. "": nothing follows the last call.
        separator: text between two blocks. "": white space, or nothing.
        repeats: a second block may follow.
    """

    begin: str
    calls: Format
    end: str = ""
    separator: str = ""
    repeats: bool = True


Blocks = Callable[[Forms, Sequence[Group], bool], Sequence[Block]]


class CallForms:
    """Builds structural tags of calls in one tool call format.

    Args:
        tokens: markers of this format that are special tokens. Either includes the first marker or
            is empty.
    """

    def __init__(self, made_by: "ToolFormat", tokens: Mapping[str, int]) -> None:
        self._alone = made_by.blocks
        self._in_text = made_by.blocks_in_text or made_by.blocks
        self._marked_by_tokens = bool(tokens)
        self._forms = Forms(tokens)

    def alone(self, groups: Sequence[Group], *, parallel: bool) -> Format:
        """Return the format of a response of one call or, if `parallel`, one or more."""
        blocks = self._alone(self._forms, groups, parallel)
        block = one_of(*map(self._whole, blocks))
        separator = blocks[0].separator
        if not parallel or not blocks[0].repeats:
            return block
        if not separator:  # so that the schemas occur only once
            return plus(self._forms.sequence(block, SPACE))
        return self._forms.sequence(block, star(self._forms.sequence(separator, block)))

    def in_text(self, groups: Sequence[Group], *, parallel: bool) -> Format:
        """Return the format of free text with calls. Nothing follows a call unless `parallel`.

        Free text has no special tokens, and the format for text with triggers cannot be combined
        with tokens. So if a token begins a call, the calls end the response.
        """
        blocks = self._in_text(self._forms, groups, parallel)
        if self._marked_by_tokens:
            calls = self.alone(groups, parallel=parallel)
            return self._forms.sequence(ANYTHING, optional(calls))
        return {
            "type": "triggered_tags",
            "triggers": list(dict.fromkeys(block.begin for block in blocks)),
            "tags": [self._tag(block) for block in blocks],
            "stop_after_first": not parallel,
        }

    def _whole(self, block: Block) -> Format:
        ends = [block.end] if block.end else []
        return self._forms.sequence(block.begin, block.calls, *ends)

    def _tag(self, block: Block) -> Format:
        return {
            "type": "tag",
            "begin": block.begin,
            "content": block.calls,
            "end": block.end,
        }


def grouped(tools: Sequence[tuple[str, Mapping[str, Any]]]) -> Sequence[Group]:
    """Group tools, given by name and schema of their arguments, by that schema."""
    groups: dict[bytes, tuple[list[str], Mapping[str, Any]]] = {}
    for name, schema in tools:
        groups.setdefault(msgspec.json.encode(schema), ([], schema))[0].append(name)
    return list(groups.values())


def _hermes(forms: Forms, groups: Sequence[Group], parallel: bool) -> Sequence[Block]:
    begin, end = HERMES
    calls = forms.sequence(SPACE, _objects(forms, groups, "arguments"), SPACE)
    return [Block(begin, calls, end)]


def _llama3(forms: Forms, groups: Sequence[Group], parallel: bool) -> Sequence[Block]:
    calls = one_of(*(_members(forms, names, schema, "parameters") for names, schema in groups))
    return [Block("{", calls, "}", separator="; ")]


def _llama3_in_text(forms: Forms, groups: Sequence[Group], parallel: bool) -> Sequence[Block]:
    """Return the blocks of Llama 3 calls in free text.

    Such a call has no marker, and other JSON must stay possible. So a call begins with its name, or
    with its parameters if all tools have the same schema.
    """
    if len(groups) == 1:
        return [Block('", "parameters": ', schema_form(groups[0][1]), "}")]
    return [
        Block(f'{{"name": {_quoted(name)}, "parameters": ', schema_form(schema), "}")
        for names, schema in groups
        for name in names
    ]


def _mistral(forms: Forms, groups: Sequence[Group], parallel: bool) -> Sequence[Block]:
    """Return the blocks of Mistral calls: a list of JSON objects, or newer names and arguments."""
    begin, call_id, arguments = MISTRAL
    item = _objects(forms, groups, "arguments")
    more = [star(forms.sequence(", ", item))] if parallel else []
    named = [
        forms.sequence(
            _names(forms, names),
            optional(forms.sequence(call_id, _MISTRAL_ID)),
            optional(forms.element(arguments)),
            schema_form(schema),
        )
        for names, schema in groups
    ]
    return [
        Block(begin, forms.sequence("[", item, *more), "]"),
        Block(begin, one_of(*named)),
    ]


def _deepseek(forms: Forms, groups: Sequence[Group], parallel: bool) -> Sequence[Block]:
    """Return the block of DeepSeek calls. V3 and R1 have a fence around the arguments."""
    calls_begin, begin, middle, end, calls_end = DEEPSEEK
    calls = []
    for names, schema in groups:
        name, arguments = _names(forms, names), schema_form(schema)
        fenced = (_FENCE_BEGIN, arguments, _FENCE_END)
        calls.append(forms.sequence(begin, "function", middle, name, *fenced, end))
        calls.append(forms.sequence(begin, name, middle, arguments, end))
    call = one_of(*calls)
    several = plus(forms.sequence(call, SPACE)) if parallel else call
    return [Block(calls_begin, several, calls_end, repeats=False)]


def _qwen3_coder(forms: Forms, groups: Sequence[Group], parallel: bool) -> Sequence[Block]:
    begin, function, _, _, function_end, end = QWEN3_CODER
    calls = [
        forms.sequence(
            f"\n{function}",
            _names(forms, names),
            ">\n",
            schema_form(schema, "qwen_xml"),
            f"{function_end}\n",
        )
        for names, schema in groups
    ]
    return [Block(begin, one_of(*calls), end)]


def _glm45(forms: Forms, groups: Sequence[Group], parallel: bool) -> Sequence[Block]:
    begin, *_, end = GLM45
    calls = [
        forms.sequence(_names(forms, names), schema_form(schema, "glm_xml"))
        for names, schema in groups
    ]
    return [Block(begin, one_of(*calls), end)]


def _objects(forms: Forms, groups: Sequence[Group], word: str) -> Format:
    """Return the format of one call as a JSON object."""
    return one_of(
        *(
            forms.sequence("{", _members(forms, names, schema, word), "}")
            for names, schema in groups
        )
    )


def _members(forms: Forms, names: Sequence[str], schema: Mapping[str, Any], word: str) -> Format:
    """Return the content between the braces of a call object."""
    quoted = _names(forms, [_quoted(name) for name in names])
    return forms.sequence('"name": ', quoted, f', "{word}": ', schema_form(schema))


def _names(forms: Forms, names: Sequence[str]) -> Format:
    return one_of(*map(forms.element, names))


def _quoted(name: str) -> str:
    return msgspec.json.encode(name).decode()


class ToolFormat(NamedTuple):
    """A model family's tool call format.

    Attributes:
        parse: grammar of a response with calls.
        markers: texts of the format that may be special tokens, the first marker first.
        blocks: makes the structural tags of calls.
        blocks_in_text: the same for calls in free text. None: they are equal.
        inside: markers of arguments, which xgrammar writes as text.
        marked: False: a call can be written without any marker.
    """

    parse: Grammar
    markers: Sequence[str]
    blocks: Blocks
    blocks_in_text: Blocks | None = None
    inside: Sequence[str] = ()
    marked: bool = True


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(formats.hermes, HERMES, _hermes),
    "llama3": ToolFormat(formats.llama3, LLAMA3, _llama3, _llama3_in_text, marked=False),
    "mistral": ToolFormat(formats.mistral, MISTRAL, _mistral),
    "deepseek": ToolFormat(formats.deepseek, DEEPSEEK, _deepseek),
    "qwen3-coder": ToolFormat(
        marked.qwen3_coder, QWEN3_CODER, _qwen3_coder, inside=QWEN3_CODER[1:5]
    ),
    "glm45": ToolFormat(marked.glm45, GLM45, _glm45, inside=GLM45[1:5]),
}


def call_forms(name: str, tokens: Mapping[str, int]) -> CallForms | None:
    """Return the builder for a format, or None if no grammar can write its calls.

    Args:
        tokens: ids of the markers that are special tokens, of any format.
    """
    if (known := TOOL_FORMATS.get(name)) is None:
        return None
    markers = known.markers if known.marked else ()
    own = {marker: tokens[marker] for marker in markers if marker in tokens}
    if own and (markers[0] not in own or own.keys() & {*known.inside}):
        return None
    return CallForms(known, own)
