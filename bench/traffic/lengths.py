"""Distributions of prompt and response lengths: a number, a range, a distribution, a mixture."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.errors import InvalidInput

HELP = "N | A-B (uniform) | lognormal:MEDIAN,SIGMA,MAX | mix:N=WEIGHT,N=WEIGHT,..."

_Draw = Callable[[np.random.Generator], int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens. Every draw is from `smallest` to `largest`."""

    text: str  # as given on the command line
    smallest: int
    largest: int
    draw: _Draw

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse a length specification. Raises InvalidInput."""
        try:
            lengths = _parsed(text)
        except ValueError:
            raise InvalidInput(f"{text!r} is no length: {HELP}") from None
        if not 1 <= lengths.smallest <= lengths.largest:
            raise InvalidInput(f"{text!r}: lengths are at least 1 and go upwards")
        return lengths

    @classmethod
    def fixed(cls, tokens: int) -> "Lengths":
        return cls(str(tokens), tokens, tokens, lambda _: tokens)


def _parsed(text: str) -> Lengths:
    kind, _, rest = text.partition(":")
    match kind:
        case "lognormal":
            median, sigma, most = (float(part) for part in rest.split(","))
            if not (1 <= median <= most and 0 <= sigma <= 10):
                raise ValueError
            mean, largest = float(np.log(median)), int(most)
            return Lengths(
                text, 1, largest, lambda rng: min(largest, max(1, int(rng.lognormal(mean, sigma))))
            )
        case "mix":
            return _mixture(text, rest)
        case _ if "-" in text:
            low, high = (int(part) for part in text.split("-"))
            return Lengths(text, low, high, lambda rng: int(rng.integers(low, high + 1)))
        case _:
            return Lengths.fixed(int(text))


def _mixture(text: str, parts: str) -> Lengths:
    weights = dict(part.split("=") for part in parts.split(","))
    tokens = np.array([int(length) for length in weights])
    share = np.array([float(weight) for weight in weights.values()])
    if share.min() < 0 or not 0 < share.sum() < np.inf:
        raise ValueError
    edges = np.cumsum(share / share.sum())

    def draw(rng: np.random.Generator) -> int:
        return int(tokens[min(len(tokens) - 1, int(np.searchsorted(edges, rng.random(), "right")))])

    return Lengths(text, int(tokens.min()), int(tokens.max()), draw)
