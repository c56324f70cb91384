"""Harmony, in which gpt-oss writes all of an answer: messages to channels, each with a header."""

import re

from router.parsers.calls import CallTelling
from router.parsers.said import Reasoning
from router.parsers.source import Source, Steps, Tell, nobody

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


def harmony(source: Source, *, reasons: bool, calls: bool) -> Steps[None]:
    """
    Args:
        reasons: whether what is thought is told.
        calls: whether functions may be called; if not, what would be a call is content.
    """
    marker = START
    while marker:
        author, marker = yield from source.collected(CHANNEL, MESSAGE)
        channel = ""
        if marker == CHANNEL:
            channel, marker = yield from source.collected(MESSAGE)
        elif not marker:  # not a message
            source.content(author)
        if not marker:  # or cut off before it began
            return
        recipient = _RECIPIENT.search(author) or _RECIPIENT.search(channel)
        if recipient and calls:
            call = CallTelling(source)
            call.name(recipient[1])
            marker = yield from source.until(START, *ENDS, tell=call.arguments, trim=True)
            call.end()
        else:
            tell = _thinking(source, reasons) if _THINKING.match(channel) else source.content
            marker = yield from source.until(START, *ENDS, tell=tell)
        if marker != START:
            marker = yield from source.accept(START)


def is_open(rendered_end: str) -> bool:
    """Whether an answer that follows a prompt with this end begins with a header."""
    return rendered_end.rstrip().endswith(f"{START}assistant")


def can_call(name: str) -> bool:
    """Whether a header has a place for such a name."""
    return re.fullmatch(_NAME, name) is not None


def _thinking(source: Source, reasons: bool) -> Tell:
    def tell(text: str) -> None:
        if text:
            source.say(Reasoning(text))

    return tell if reasons else nobody
