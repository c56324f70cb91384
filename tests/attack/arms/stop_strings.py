"""Stop strings, as many and as long as allowed, parts of which occur in every response."""

from random import Random

from tests.attack.posts import NUM_CHOICES, complete
from tests.attack.target import Target

NUM_WORKERS = 2

_MAX_STOPS, _MAX_CHARACTERS = 16, 1024


async def almost(target: Target, draw: Random) -> None:
    """Send strings that repeat what the demo model repeats, and differ in their last character."""
    unit = draw.choice((" x", " 1", " a", "ab"))
    text = (unit * _MAX_CHARACTERS)[: _MAX_CHARACTERS - 1]
    await _stop(target, draw, [text + chr(65 + number) for number in range(_MAX_STOPS)])


async def of_all_lengths(target: Target, draw: Random) -> None:
    """Send strings of which each is a prefix of the next one."""
    step = _MAX_CHARACTERS // _MAX_STOPS
    lengths = range(step, _MAX_CHARACTERS + 1, step)
    await _stop(target, draw, [(" x" * length)[: length - 1] + "Z" for length in lengths])


async def too_many(target: Target, draw: Random) -> None:
    await _stop(target, draw, ["x" * _MAX_CHARACTERS * draw.choice((1, 9))] * 5 * _MAX_STOPS)


async def _stop(target: Target, draw: Random, stops: list[str]) -> None:
    await complete(target, stop=stops, n=draw.choice(NUM_CHOICES), max_tokens=100)
