"""Tools of a chat, for all HTTP APIs: the offer, the grammar of calls, and parsing."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from api.dialect.fields import GenerationFields, choices
from api.dialect.messages import ToolDefinition, ToolFunction, shown
from api.dialect.problems import invalid
from api.parsers.harmony import can_call
from api.parsers.model_format import FREE, NONE, SCHEMA, ModelFormat, Tools
from api.parsers.source import StreamParser
from api.requests.generate_params import (
    ChatPrompt,
    GenerateParams,
    PredictionPrompt,
    SharedPrompt,
)
from common.requests.sampling import (
    MAX_GUIDE_CHARACTERS,
    GuidedDecoding,
    SamplingParams,
    as_form,
    tag,
)

_ANY_OBJECT = {"type": "object"}
# JSON schema keywords whose values are data, and keywords that map names to schemas. A name in such
# a map may equal a keyword.
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)


# Any model can write JSON under a grammar. A forced response is therefore a JSON list of calls,
# whatever the model's own tool call format.
def guide_of_calls(tools: Sequence[ToolDefinition], *, parallel: bool) -> GuidedDecoding:
    """Return the guide for a response that consists only of tool calls.

    Args:
        tools: tools, at least one of which is called.
        parallel: more than one call is allowed.

    Raises:
        RecursionError: parameters are nested too deeply.
    """
    places = [f"#/items/anyOf/{n}/properties/parameters" for n in range(len(tools))]
    calls = [_call(*each) for each in zip(tools, places, strict=True)]
    schema = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        **({} if parallel else {"maxItems": 1}),
    }
    return GuidedDecoding("json_schema", msgspec.json.encode(schema).decode())


def _call(tool: ToolDefinition, place: str) -> dict[str, Any]:
    parameters = _moved(tool.function.parameters or _ANY_OBJECT, place)
    return {
        "type": "object",
        "properties": {"name": {"enum": [tool.function.name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """Return a schema as part of another one at `place`, with its references adjusted."""
    match schema:
        case Mapping():
            return {word: _moved_word(word, value, place) for word, value in schema.items()}
        case [*schemas]:
            return [_moved(each, place) for each in schemas]
        case _:
            return schema


def _moved_word(word: str, value: Any, place: str) -> Any:
    if word in _VALUES:
        return value
    if word in _BY_NAME and isinstance(value, Mapping):
        return {name: _moved(each, place) for name, each in value.items()}
    if word == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    return _moved(value, place)


class ToolOffer(msgspec.Struct, frozen=True):
    """Tools that are shown to the model and that it may call."""

    tools: Sequence[ToolDefinition]
    must: Sequence[
        ToolDefinition
    ]  # if not empty, the model must call one of these instead of responding with text
    parallel: bool  # False: at most one call

    @property
    def shown(self) -> list[dict[str, object]]:
        """Return the tools in the format of chat templates."""
        return [shown(tool.function) for tool in self.tools]

    @property
    def callable(self) -> Tools | None:
        """Return the parameters of each tool by its name, or None if there are no tools."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools} or None


class NamedTool(Protocol):
    """The choice of one tool."""

    @property
    def name(self) -> str | None: ...


def offered(
    tools: Sequence[ToolDefinition],
    choice: str | NamedTool | None,
    model_format: ModelFormat,
    *,
    parallel: bool | None,
) -> ToolOffer:
    """Return the tools that a request offers.

    Args:
        choice: "auto" (also None and ""), "none", "required", or the tool that must be called.
        model_format: how the model calls tools.
        parallel: None: no limit.

    Raises:
        ApiError: there is no such tool or choice, or the model's tool call format is unknown.
    """
    must: Sequence[ToolDefinition] | None = None
    match choice:
        case "required":
            must = tools
        case "none":
            tools = ()
        case None | "" | "auto":
            pass
        case str():
            kinds = "auto, none, required or one of the tools"
            raise invalid("tool_choice", f"is {kinds}, not {choice[:40]!r}")
        case _:
            must = [tool for tool in tools if tool.function.name == choice.name]
            parallel = False
    if must is not None and not must:
        raise invalid("tool_choice", ": tools does not contain this tool")
    if tools and not must and model_format.tools == NONE:
        problem = ": the tool call format of this model is unknown (set --tool-parser)"
        raise invalid("tools", problem, code="unsupported")
    return ToolOffer(tools, must or (), parallel is not False)


def optional(tools: Sequence[Mapping[str, Any]]) -> ToolOffer:
    """Return an offer of tools in OpenAI's form, all of which are optional."""
    functions = [tool["function"] for tool in tools]
    return ToolOffer(
        [
            ToolDefinition(
                "function",
                ToolFunction(
                    name=each["name"],
                    parameters=each.get("parameters"),
                    strict=each.get("strict"),
                ),
            )
            for each in functions
        ],
        must=(),
        parallel=True,
    )


def guided(
    samplings: Sequence[SamplingParams],
    offer: ToolOffer,
    model_format: ModelFormat,
    form_field: str,
) -> Sequence[SamplingParams]:
    """Return the sampling parameters with the grammar that the tools need.

    If a call is required, the response consists of calls only, and a response format applies to a
    later turn. If calls are optional, the response has the requested format or consists of calls.
    Without a response format it is free text, in which each call is complete.

    Args:
        model_format: the model's tool call format.
        form_field: name of the field that requested a response format, for errors.

    Raises:
        ApiError: no grammar can express the request, or parameters are nested too deeply.
    """
    if not offer.tools:
        return samplings
    try:
        guide = _guide(samplings[0].guide, offer, model_format, form_field)
    except RecursionError:
        raise invalid("tools", ": parameters are nested too deeply") from None
    return [replace(each, guide=guide) for each in samplings]


def _guide(
    form: GuidedDecoding | None, offer: ToolOffer, model_format: ModelFormat, form_field: str
) -> GuidedDecoding | None:
    if offer.must:
        return _must_guide(offer, model_format)
    if form is None:
        return _guide_of_text(offer, model_format)
    return _guide_of_form(form, offer, model_format, form_field)


def _must_guide(offer: ToolOffer, model_format: ModelFormat) -> GuidedDecoding:
    if model_format.channels is None:
        return guide_of_calls(offer.must, parallel=offer.parallel)
    functions = [tool.function for tool in offer.must]
    for function in functions:
        if not can_call(function.name):
            problem = (
                f": this model's tool call format does not allow the name {function.name[:40]!r}"
            )
            raise invalid("tool_choice", problem, code="unsupported")
    tools = [(each.name, each.parameters or {"type": "object"}) for each in functions]
    return tag(model_format.channels.calls(tools, parallel=offer.parallel))


def _guide_of_text(offer: ToolOffer, model_format: ModelFormat) -> GuidedDecoding | None:
    """Return the grammar of a response that is text with optional calls. None: no constraint."""
    strict = any(tool.function.strict for tool in offer.tools)
    if not strict and model_format.arguments == FREE:
        return None
    form = model_format.form_of_calls(_held(offer, model_format), parallel=offer.parallel)
    if form is None:
        return None
    guide = tag(form)
    # Only strict tools guarantee a grammar. For other tools, a grammar that is too large is
    # dropped.
    return guide if strict or len(guide.text) <= MAX_GUIDE_CHARACTERS else None


def _guide_of_form(
    form: GuidedDecoding, offer: ToolOffer, model_format: ModelFormat, form_field: str
) -> GuidedDecoding:
    """Return the grammar of a response that has this format or consists of calls.

    A structural tag already defines where calls are, and is returned unchanged.
    """
    inner = as_form(form)
    if inner is None:
        return form
    either = model_format.form_of_calls_or(
        inner, _held(offer, model_format), parallel=offer.parallel
    )
    if either is None:
        problem = (
            ": this model's tool calls cannot be combined with structured output: send one of the "
            "two, or set tool_choice to none or required"
        )
        raise invalid(form_field, problem, code="unsupported")
    return tag(either)


def _held(offer: ToolOffer, model_format: ModelFormat) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """Return the tools with the schemas that constrain their arguments.

    A strict tool has its own schema. Other tools accept any JSON object, unless the router
    constrains all arguments to their schemas.
    """
    return [
        (
            each.name,
            ((each.strict or model_format.arguments == SCHEMA) and each.parameters)
            or {"type": "object"},
        )
        for each in (tool.function for tool in offer.tools)
    ]


class ChatCall(NamedTuple):
    """The choices of a chat.

    Attributes:
        parser: returns the parser of one choice.
        form: the field that constrains the response, or "".
    """

    requests: Sequence[GenerateParams]
    parser: Callable[[], StreamParser]
    form: str


def chat_call(
    fields: GenerationFields,
    prompt: ChatPrompt,
    sampled: Sequence[SamplingParams],
    offer: ToolOffer,
    model_format: ModelFormat,
    *,
    form_field: str,
    max_tokens_field: str = "",
    prediction: PredictionPrompt | None = None,
    reasons: bool = True,
) -> ChatCall:
    """Return the choices of a chat.

    Args:
        sampled: sampling parameters of each choice, without the grammar of tools.
        form_field: name of the field that requests a response format, or "".
        max_tokens_field, prediction: see GenerateParams.
        reasons: reasoning is returned.

    Raises:
        ApiError, InvalidRequest: see `guided` and `choices`.
    """
    requests = choices(
        fields,
        [prompt],
        guided(sampled, offer, model_format, form_field),
        max_tokens_field=max_tokens_field,
        shown=model_format.shown[bool(offer.tools)],
        prediction=prediction,
    )
    parser = partial(response_parser, model_format, requests[0].prompt, offer, reasons=reasons)
    return ChatCall(requests, parser, form_field or ("tools" if offer.tools else ""))


def response_parser(
    model_format: ModelFormat, prompt: SharedPrompt, offer: ToolOffer, *, reasons: bool = True
) -> StreamParser:
    """Return the parser of one response to `prompt`.

    Args:
        reasons: reasoning is returned.
    """
    parser = model_format.parser_of_calls if offer.must else model_format.parser
    return StreamParser(
        lambda: parser(prompt.rendering.end, offer.callable, reasons=reasons),
        parallel=offer.parallel,
    )
