"""Parser of reasoning between markers at the start of a response, as in DeepSeek-R1 and Qwen3.

Another grammar parses the text that follows.
"""

from collections.abc import Callable

from api.parsers.events import ReasoningEvent
from api.parsers.source import Emit, ParserSource, Steps, discard

OPEN, CLOSE = "<think>", "</think>"


def think(
    source: ParserSource,
    then: Callable[[ParserSource], Steps[None]],
    *,
    opened: bool,
    reasons: bool = True,
) -> Steps[None]:
    """Parse reasoning.

    Args:
        then: grammar of the text that follows.
        opened: whether the response begins within the reasoning, without an opening marker.
        reasons: whether reasoning is returned.
    """
    emit: Emit = (lambda text: _say(source, text)) if reasons else discard
    if (yield from source.accept(OPEN)) or opened:
        yield from source.spaces()
        yield from source.until(CLOSE, emit=emit, trim=True)
        yield from source.spaces()
    yield from then(source)


def is_open(rendered_end: str) -> bool:
    """Return whether a prompt ends within reasoning."""
    return rendered_end.rstrip().endswith(OPEN)


def is_closed(rendered_end: str) -> bool:
    """Return whether a prompt has closed the reasoning already."""
    return rendered_end.rstrip().endswith(CLOSE)


def _say(source: ParserSource, text: str) -> None:
    if text:
        source.say(ReasoningEvent(text))
