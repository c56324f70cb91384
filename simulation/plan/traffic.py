"""The load of a plan: a rate, and the lengths of prompts and responses."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

_MAX_BYTES = 1 << 30
_SAMPLE = 128  # requests that stand for all of a file
_SEED = 1


class Lengths(msgspec.Struct, frozen=True):
    """The tokens of a request."""

    input: int
    output: int


class _TraceLine(msgspec.Struct, frozen=True):
    """A line of a file in the format of Mooncake's traces."""

    input_length: int
    output_length: int
    timestamp: float = 0.0  # ms
    hash_ids: list[int] = []


class Traffic(msgspec.Struct, frozen=True):
    """Poisson arrivals of requests.

    Attributes:
        rate: requests/s.
        requests: their lengths, all equally likely.
        prefixes: whether the file has prefixes that requests share. Plans ignore them.
    """

    rate: float
    requests: tuple[Lengths, ...]
    prefixes: bool = False

    @classmethod
    def uniform(cls, rate: float, input_tokens: int, output_tokens: int) -> "Traffic":
        """Return the load of requests of one length."""
        return cls(rate, (Lengths(input_tokens, output_tokens),))

    @classmethod
    def read(cls, file: Path, rate: float | None = None) -> "Traffic":
        """Return the load of a trace: JSON lines with timestamp (ms), input_length and
        output_length.

        Args:
            rate: requests/s. None: the mean rate of the trace.
        Raises:
            ValueError: names the file and the line.
        """
        rng, chosen, count = random.Random(_SEED), list[_TraceLine](), 0
        first, last = math.inf, -math.inf
        for count, line in enumerate(_lines(file), start=1):
            first, last = min(first, line.timestamp), max(last, line.timestamp)
            if count <= _SAMPLE:
                chosen.append(line)
            elif (place := rng.randrange(count)) < _SAMPLE:
                chosen[place] = line
        if not chosen:
            raise ValueError(f"{file} has no line")
        if rate is None and last <= first:
            raise ValueError(f"{file} has no timestamps, hence no rate of requests")
        return cls(
            rate=1e3 * (count - 1) / (last - first) if rate is None else rate,
            requests=tuple(Lengths(line.input_length, line.output_length) for line in chosen),
            prefixes=any(line.hash_ids for line in chosen),
        )

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request and its response."""
        return max(each.input + each.output for each in self.requests)

    @property
    def input(self) -> float:
        """Return the mean tokens of a prompt."""
        return sum(each.input for each in self.requests) / len(self.requests)

    @property
    def output(self) -> float:
        """Return the mean tokens of a response."""
        return sum(each.output for each in self.requests) / len(self.requests)

    @property
    def context(self) -> float:
        """Return the mean KV tokens of a running request. Long responses run longer."""
        weighted = sum(each.output * (each.input + each.output / 2) for each in self.requests)
        return weighted / sum(each.output for each in self.requests)


def _lines(file: Path) -> Iterator[_TraceLine]:
    decoder = msgspec.json.Decoder(_TraceLine)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{file} is larger than {_MAX_BYTES >> 20} MiB")
        with file.open("rb") as texts:
            for number, text in enumerate(texts, start=1):
                if text.strip():
                    yield _line(decoder, text, f"{file}, line {number}")
    except OSError as error:
        raise ValueError(f"{file}: {error}") from None


def _line(decoder: msgspec.json.Decoder[_TraceLine], text: bytes, where: str) -> _TraceLine:
    try:
        line = decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None
    if min(line.input_length, line.output_length) < 1:
        raise ValueError(f"{where}: input_length and output_length must be at least 1")
    if not 0 <= line.timestamp < 1e12:
        raise ValueError(f"{where}: timestamp must be from 0 to 1e12 ms")
    return line
