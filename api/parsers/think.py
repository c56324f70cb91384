"""Parser of reasoning between markers at the start of a response, as in DeepSeek-R1 and Qwen3.

Another grammar parses the text that follows.
"""

from collections.abc import Callable

from api.parsers.events import ReasoningEvent
from api.parsers.source import ParserSource, Steps, Tell, nobody

OPEN, CLOSE = "<think>", "</think>"


def think(
    source: ParserSource,
    then: Callable[[ParserSource], Steps[None]],
    *,
    opened: bool,
    tells: bool = True,
) -> Steps[None]:
    """Parse reasoning.

    Args:
        then: grammar of the text that follows.
        opened: whether the response begins within the reasoning, without an opening marker.
        tells: whether reasoning is returned.
    """
    tell: Tell = (lambda text: _say(source, text)) if tells else nobody
    if (yield from source.accept(OPEN)) or opened:
        yield from source.spaces()
        yield from source.until(CLOSE, tell=tell, trim=True)
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
