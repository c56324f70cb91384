"""Reasoning between markers at the start of an answer, as of DeepSeek-R1, Qwen3 and others: what is
behind is for another grammar."""

from collections.abc import Callable

from api.parsers.events import Reasoning
from api.parsers.source import Source, Steps, Tell, nobody

OPEN, CLOSE = "<think>", "</think>"


def think(
    source: Source,
    then: Callable[[Source], Steps[None]],
    *,
    opened: bool,
    tells: bool = True,
) -> Steps[None]:
    """
    Args:
        then: what comes after.
        opened: the answer begins in the midst of it, and need not open it.
        tells: False: what is thought is left out.
    """
    tell: Tell = (lambda text: _say(source, text)) if tells else nobody
    if (yield from source.accept(OPEN)) or opened:
        yield from source.spaces()
        yield from source.until(CLOSE, tell=tell, trim=True)
        yield from source.spaces()
    yield from then(source)


def is_open(rendered_end: str) -> bool:
    """Whether a prompt ends in the midst of reasoning."""
    return rendered_end.rstrip().endswith(OPEN)


def is_closed(rendered_end: str) -> bool:
    """Whether a prompt says that there is to be none."""
    return rendered_end.rstrip().endswith(CLOSE)


def _say(source: Source, text: str) -> None:
    if text:
        source.say(Reasoning(text))
