"""Tools that a chat offers, in whatever form it is written, and how calls of them are heard."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from common.requests.guide import Guide, tag
from common.requests.sampling import SamplingParams
from router.api.dialect.forced import guide_of_calls
from router.api.dialect.messages import Tool, shown
from router.api.dialect.problems import Refusal
from router.parsers.harmony import can_call
from router.parsers.listener import Listener
from router.parsers.speech import NONE, Speech, Tools
from router.requests.wanted import SharedPrompt


class Offer(msgspec.Struct, frozen=True):
    """What the model is told of, and may call."""

    tools: Sequence[Tool]
    must: Sequence[Tool]  # of which it must call one; none: it may as well say something
    parallel: bool  # False: no more than one call

    @property
    def shown(self) -> list[dict[str, object]]:
        """As chat templates know them."""
        return [shown(tool.function) for tool in self.tools]

    @property
    def callable(self) -> Tools | None:
        """None: there are none."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools} or None


def offered(
    tools: Sequence[Tool],
    choice: str | None,
    named: str | None,
    speech: Speech,
    *,
    parallel: bool | None,
) -> Offer:
    """
    Args:
        choice: "auto", "none", "required"; None: auto, or `named`.
        named: the tool that must be called.
        speech: how the model calls tools.
        parallel: None: as the model likes.
    Raises:
        Refusal: there is no such tool or choice; or nobody could tell a call from content.
    """
    must: Sequence[Tool] = ()
    if named is not None:
        must = [tool for tool in tools if tool.function.name == named]
        parallel = False
    elif choice == "required":
        must = tools
    elif choice == "none":
        tools = ()
    elif choice not in (None, "", "auto"):
        sentence = f"tool_choice is auto, none, required or one of the tools, not {choice[:40]!r}"
        raise Refusal(400, sentence, param="tool_choice")
    if not must and (named is not None or choice == "required"):
        raise Refusal(400, "tool_choice: there is no such tool", param="tool_choice")
    if tools and not must and speech.tools == NONE:
        raise Refusal(
            400,
            "tools: how this model calls them is not known here (--tool-parser says it)",
            param="tools",
            code="unsupported",
        )
    return Offer(tools, must, parallel is not False)


def guided(
    samplings: Sequence[SamplingParams], offer: Offer, speech: Speech
) -> Sequence[SamplingParams]:
    """The same, with a grammar where a tool must be called, or tools are strict.

    Args:
        speech: how the model calls tools.
    Raises:
        Refusal: the answer is to have another form besides; or the model cannot write that name.
    """
    if not offer.must:
        strict = _strict_guide(offer, speech) if samplings[0].guide is None else None
        return [replace(each, guide=strict) for each in samplings] if strict else samplings
    if samplings[0].guide is not None:
        sentence = "tool_choice asks for calls, and another field for another form of the answer"
        raise Refusal(400, sentence, param="tool_choice")
    guide = _must_guide(offer, speech)
    return [replace(each, guide=guide) for each in samplings]


def _must_guide(offer: Offer, speech: Speech) -> Guide:
    if speech.channels is None:
        return guide_of_calls(offer.must, parallel=offer.parallel)
    functions = [tool.function for tool in offer.must]
    for function in functions:
        if not can_call(function.name):
            sentence = f"tool_choice: this model cannot call {function.name[:40]!r}"
            raise Refusal(400, sentence, param="tool_choice", code="unsupported")
    tools = [(each.name, each.parameters or {"type": "object"}) for each in functions]
    return tag(speech.channels.calls(tools, parallel=offer.parallel))


def _strict_guide(offer: Offer, speech: Speech) -> Guide | None:
    """Of an answer that need not call: a strict tool's arguments are of its schema, and those of
    the others beside it are JSON. None: there is none that is strict, or no grammar of calls."""
    functions = [tool.function for tool in offer.tools]
    if not any(function.strict for function in functions):
        return None
    tools = [
        (each.name, (each.strict and each.parameters) or {"type": "object"}) for each in functions
    ]
    form = speech.form_of_calls(tools, parallel=offer.parallel)
    return None if form is None else tag(form)


def listening(
    speech: Speech, prompt: SharedPrompt, offer: Offer, *, reasons: bool = True
) -> Callable[[], Listener]:
    """Makes a Listener for each answer to `prompt`, once that has been rendered.

    Args:
        reasons: whether what is thought is told.
    """

    def listener() -> Listener:
        if offer.must:
            parser = speech.parser_of_calls(prompt.rendering.end, offer.callable, reasons=reasons)
        else:
            parser = speech.parser(prompt.rendering.end, offer.callable, reasons=reasons)
        return Listener(parser, parallel=offer.parallel)

    return listener
