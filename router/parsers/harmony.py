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

_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
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
        header, begins = yield from source.collected(MESSAGE)
        if not begins:  # not a message, or cut off before it began
            source.content("" if CHANNEL in header else header)
            return
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        if recipient and calls:
            call = CallTelling(source)
            call.name(recipient[1])
            marker = yield from source.until(START, *ENDS, tell=call.arguments, trim=True)
            call.end()
        else:
            thought = channel is not None and channel[1] == THINKING
            tell = _thinking(source, reasons) if thought else source.content
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
