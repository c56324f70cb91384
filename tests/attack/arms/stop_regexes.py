"""Stop regexes with large sets and repetitions, for many choices at once."""

from random import Random

from tests.attack.posts import NUM_CHOICES, complete
from tests.attack.target import Target

NUM_WORKERS = 2

_CHARACTERS = 1024  # of one expression, at most
_POSITIONS = 256  # of all expressions of a request, at most


async def long_sets(target: Target, draw: Random) -> None:
    """Send a set of as many characters as fit, repeated."""
    times = draw.choice((2, 9, 60, 256, 5000))
    letters = "".join(chr(0x4E00 + draw.randrange(20_000)) for _ in range(_CHARACTERS - 12))
    await _stop(target, draw, f"[{letters}]{{{times}}}")


async def repetitions(target: Target, draw: Random) -> None:
    """Send regexes with as many active positions as allowed."""
    await _stop(target, draw, draw.choice(_REPETITIONS))


async def many(target: Target, draw: Random) -> None:
    """Send sixteen regexes of the largest total size."""
    num_each = _POSITIONS // 16 - 2
    await _stop(target, draw, *(f"[a-z ]{{{num_each}}}{chr(65 + n)}" for n in range(16)))


_REPETITIONS = (
    *("(x?){120}x{120}", "([a-z ]*){9}Z", "[ -~]{0,250}Z", ".{0,255}", "((a|b){1,9}){1,9}Z"),
    *("(([a-z ]{2,15})+ ?){15}Z", "(?i)([a-z]| ){250}Z", "(a{1000}){1000}", "((((a+)+)+)+)+Z"),
)


async def _stop(target: Target, draw: Random, *expressions: str) -> None:
    num_choices = draw.choice(NUM_CHOICES)
    await complete(target, stop_regex=list(expressions), n=num_choices, max_tokens=200)
