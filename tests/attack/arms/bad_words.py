"""Bad words: as many and as long as allowed, and more, times the number of choices."""

from random import Random

from tests.attack.posts import NUM_CHOICES, complete
from tests.attack.target import Target

NUM_WORKERS = 2

_MAX_WORDS, _MAX_CHARACTERS = 64, 16_384  # of all words


async def accepted(target: Target, draw: Random) -> None:
    await _avoid(target, draw, _MAX_WORDS, _MAX_CHARACTERS // _MAX_WORDS)


async def refused(target: Target, draw: Random) -> None:
    """Send too many words, or too long ones."""
    num_words = draw.choice((_MAX_WORDS, 10 * _MAX_WORDS))
    await _avoid(target, draw, num_words, draw.choice((1024, 4096)))


async def _avoid(target: Target, draw: Random, num_words: int, num_characters: int) -> None:
    words = ["".join(draw.choices("ab ü\U0001f600", k=num_characters)) for _ in range(num_words)]
    await complete(target, bad_words=words, n=draw.choice(NUM_CHOICES), max_tokens=50)
