"""Harmony, in which gpt-oss writes all of an answer: messages to channels, each with a header."""

import re

from router.parsers.calls import CallTelling
from router.parsers.said import Reasoning
from router.parsers.source import Source, Steps, Tell, nobody

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
ENDS = ("<|end|>", "<|call|>", "<|return|>")

_START, _CHANNEL, _, _MESSAGE = MARKERS
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def harmony(source: Source, *, reasons: bool, calls: bool) -> Steps[None]:
    """
    Args:
        reasons: whether what is thought is told.
        calls: whether functions may be called; if not, what would be a call is content.
    """
    marker = _START
    while marker:
        header, begins = yield from source.collected(_MESSAGE)
        if not begins:  # not a message, or cut off before it began
            source.content("" if _CHANNEL in header else header)
            return
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        if recipient and calls:
            call = CallTelling(source)
            call.name(recipient[1])
            marker = yield from source.until(_START, *ENDS, tell=call.arguments, trim=True)
            call.end()
        else:
            thought = channel is not None and channel[1] == "analysis"
            tell = _thinking(source, reasons) if thought else source.content
            marker = yield from source.until(_START, *ENDS, tell=tell)
        if marker != _START:
            marker = yield from source.accept(_START)


def _thinking(source: Source, reasons: bool) -> Tell:
    def tell(text: str) -> None:
        if text:
            source.say(Reasoning(text))

    return tell if reasons else nobody
