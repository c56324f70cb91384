"""Parser of Harmony, the format of gpt-oss: messages to channels, each with a header."""

import re

from api.parsers.calls import ToolCallEvents
from api.parsers.events import ReasoningEvent
from api.parsers.source import ParserSource, Steps, Tell, nobody

MARKERS = START, CHANNEL, CONSTRAIN, MESSAGE = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
)
ENDS = END, *_ = ("<|end|>", "<|call|>", "<|return|>")
THINKING = "analysis"

_THINKING = re.compile(rf"\s*{THINKING}\b")
_NAME = r"[^\s<]+"
_RECIPIENT = re.compile(rf"to=functions\.({_NAME})")


def harmony(source: ParserSource, *, reasons: bool, calls: bool) -> Steps[None]:
    """Parse a Harmony response.

    Args:
        reasons: whether reasoning is returned.
        calls: whether functions may be called. If not, a call is content.
    """
    author, marker = yield from source.collected(CHANNEL, MESSAGE, START, *ENDS)
    if marker not in (CHANNEL, MESSAGE):  # it begins within a message, or has none
        source.content(author)
    while marker:
        channel = ""
        if marker == CHANNEL:
            channel, marker = yield from source.collected(MESSAGE, START, *ENDS)
        if marker == MESSAGE:
            recipient = _RECIPIENT.search(author) or _RECIPIENT.search(channel)
            marker = yield from _message(source, channel, recipient if calls else None, reasons)
        if marker in ENDS:
            marker = yield from source.accept(START)
        if marker == START:
            author, marker = yield from source.collected(CHANNEL, MESSAGE, START, *ENDS)


def _message(
    source: ParserSource, channel: str, recipient: re.Match[str] | None, reasons: bool
) -> Steps[str]:
    """Report one message to its end, and return the marker there."""
    if recipient is None:
        tell = _thinking(source, reasons) if _THINKING.match(channel) else source.content
        return (yield from source.until(START, *ENDS, tell=tell))
    call = ToolCallEvents(source)
    call.name(recipient[1])
    marker = yield from source.until(START, *ENDS, tell=call.arguments, trim=True)
    call.end()
    return marker


def is_open(rendered_end: str) -> bool:
    """Return whether a response to a prompt with this end begins with a header."""
    return rendered_end.rstrip().endswith(f"{START}assistant")


def can_call(name: str) -> bool:
    """Return whether a tool's name fits into a header."""
    return re.fullmatch(_NAME, name) is not None


def _thinking(source: ParserSource, reasons: bool) -> Tell:
    def tell(text: str) -> None:
        if text:
            source.say(ReasoningEvent(text))

    return tell if reasons else nobody
