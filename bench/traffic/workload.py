"""Workloads and their length distributions: prompts as token ids, determined by the seed.

Ids are from a small range that every vocabulary has, so lengths are exact with any tokenizer. Only
traces define sending times.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from bench.errors import InvalidInput
from simulation.plan.traffic import TraceLine, trace_lines

HELP = "N | A-B (uniform) | lognormal:MEDIAN,SIGMA,MAX | mix:N=WEIGHT,N=WEIGHT,..."

_Draw = Callable[[np.random.Generator], int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens. Every draw is in [smallest, largest]."""

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
            raise InvalidInput(f"{text!r} is not a length: {HELP}") from None
        if not 1 <= lengths.smallest <= lengths.largest:
            raise InvalidInput(f"{text!r}: lengths must be at least 1 and ascending")
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


VOCABULARY = (3, 250)  # every vocabulary has at least the bytes. The first ids may be special
TRACE_BLOCK_TOKENS = 512  # tokens of one entry of hash_ids


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request, greedy and without stop tokens."""

    prompt: Sequence[int]
    max_tokens: int
    group: str = ""  # category in reports: "long", "background", "probe"


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of traffic.

    Prompts of one prefix group begin with the same `prefix_tokens` tokens, which count in the
    prompt's length. Other prompts share nothing.
    """

    prompt_tokens: Lengths
    output_tokens: Lengths
    prefix_groups: int = 0
    prefix_tokens: int = 0
    group: str = ""
    long_tokens: int | None = None  # prompts of at least this length are in the group "long"

    def __post_init__(self) -> None:
        if bool(self.prefix_groups) != bool(self.prefix_tokens):
            raise InvalidInput("--prefix-groups and --prefix-tokens go together")
        if self.prefix_tokens >= self.prompt_tokens.smallest:
            raise InvalidInput(
                f"--prefix-tokens {self.prefix_tokens} leaves nothing of a prompt of "
                f"{self.prompt_tokens.smallest} tokens, the shortest of --prompt-tokens"
            )

    @property
    def largest(self) -> int:
        """Return the maximum number of tokens in a prompt and its response."""
        return self.prompt_tokens.largest + self.output_tokens.largest

    def jobs(self, seed: int) -> Iterator[WorkloadRequest]:
        """Yield jobs without end.

        The seed also determines the prefixes, so runs with another seed find none cached.
        """
        rng = np.random.default_rng(seed)
        prefixes = rng.integers(*VOCABULARY, (self.prefix_groups, self.prefix_tokens)).tolist()
        while True:
            length, most = self.prompt_tokens.draw(rng), self.output_tokens.draw(rng)
            prefix = prefixes[int(rng.integers(len(prefixes)))] if prefixes else []
            rest = rng.integers(*VOCABULARY, length - len(prefix)).tolist()
            yield WorkloadRequest((*prefix, *rest), most, self._group(length))

    def _group(self, length: int) -> str:
        if self.long_tokens is not None and length >= self.long_tokens:
            return "long"
        return self.group


@dataclass(frozen=True, slots=True)
class WorkloadTrace:
    """The requests of a trace file, sent once in the order of their times."""

    name: str
    lines: tuple[TraceLine, ...]

    @classmethod
    def read(cls, file: Path) -> "WorkloadTrace":
        """Read a trace, see `trace_lines`. Raises InvalidInput, which names the line."""
        try:
            lines = sorted(trace_lines(file), key=lambda line: line.timestamp)
        except ValueError as error:
            raise InvalidInput(f"--trace {error}") from None
        if not lines:
            raise InvalidInput(f"--trace {file} has no lines")
        return cls(file.name, tuple(lines))

    @property
    def largest(self) -> int:
        return max(line.input_length + line.output_length for line in self.lines)

    def jobs(self, seed: int) -> Iterator[WorkloadRequest]:
        rng = np.random.default_rng(seed)
        for line in self.lines:
            shared = [token for block in line.hash_ids for token in _block(seed, abs(block))]
            shared = shared[: line.input_length]
            rest = rng.integers(*VOCABULARY, line.input_length - len(shared)).tolist()
            yield WorkloadRequest((*shared, *rest), line.output_length)

    def times(self) -> list[float]:
        """Return the due time of each request in seconds from the first."""
        return [(line.timestamp - self.lines[0].timestamp) / 1e3 for line in self.lines]


@lru_cache(maxsize=4096)
def _block(seed: int, block: int) -> tuple[int, ...]:
    rng = np.random.default_rng((seed, block))
    return tuple(rng.integers(*VOCABULARY, TRACE_BLOCK_TOKENS).tolist())
