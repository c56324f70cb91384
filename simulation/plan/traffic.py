"""Input and output of a plan: load, latency limits, and predicted latency."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

_MAX_BYTES = 1 << 30
_SAMPLE = 128  # requests that represent all requests of a file
_SEED = 1


class RequestLengths(msgspec.Struct, frozen=True):
    """The tokens of a request."""

    input: int
    output: int


class TraceLine(msgspec.Struct, frozen=True):
    """A line of a file in the format of Mooncake's traces."""

    input_length: int
    output_length: int
    timestamp: float = 0.0  # milliseconds
    hash_ids: list[int] = []


class Traffic(msgspec.Struct, frozen=True):
    """Poisson arrivals of requests.

    Attributes:
        rate: requests/s.
        requests: their lengths, all equally likely.
        prefixes: requests of the file share prefixes, which plans ignore.
    """

    rate: float
    requests: tuple[RequestLengths, ...]
    prefixes: bool = False

    @classmethod
    def uniform(cls, rate: float, input_tokens: int, output_tokens: int) -> "Traffic":
        """Return the load of requests of one length."""
        return cls(rate, (RequestLengths(input_tokens, output_tokens),))

    @classmethod
    def read(cls, file: Path, rate: float | None = None) -> "Traffic":
        """Return the load of a trace: JSON lines with timestamp (ms), input_length and
        output_length.

        Args:
            rate: requests/s. None: the mean rate of the trace.

        Raises:
            ValueError: names the file and the line.
        """
        rng, chosen, count = random.Random(_SEED), list[TraceLine](), 0
        first, last = math.inf, -math.inf
        for count, line in enumerate(trace_lines(file), start=1):
            first, last = min(first, line.timestamp), max(last, line.timestamp)
            if count <= _SAMPLE:
                chosen.append(line)
            elif (place := rng.randrange(count)) < _SAMPLE:
                chosen[place] = line
        if not chosen:
            raise ValueError(f"{file} has no lines")
        if rate is None and last <= first:
            raise ValueError(f"{file} has no timestamps, so the rate of requests is unknown")
        return cls(
            rate=1e3 * (count - 1) / (last - first) if rate is None else rate,
            requests=tuple(
                RequestLengths(line.input_length, line.output_length) for line in chosen
            ),
            prefixes=any(line.hash_ids for line in chosen),
        )

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request, with its response."""
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
        """Return the mean KV tokens of a running request. Long responses count longer."""
        weighted = sum(each.output * (each.input + each.output / 2) for each in self.requests)
        return weighted / sum(each.output for each in self.requests)


def trace_lines(file: Path) -> Iterator[TraceLine]:
    """Yield the lines of a trace. Raises ValueError, which names the file and the line."""
    decoder = msgspec.json.Decoder(TraceLine)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{file} is larger than {_MAX_BYTES >> 20} MiB")
        with file.open("rb") as texts:
            for number, text in enumerate(texts, start=1):
                if text.strip():
                    yield _line(decoder, text, f"{file}, line {number}")
    except OSError as error:
        raise ValueError(f"{file}: {error}") from None


def _line(decoder: msgspec.json.Decoder[TraceLine], text: bytes, where: str) -> TraceLine:
    try:
        line = decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None
    if min(line.input_length, line.output_length) < 1:
        raise ValueError(f"{where}: input_length and output_length must be at least 1")
    if not 0 <= line.timestamp < 1e12:
        raise ValueError(f"{where}: timestamp must be from 0 to 1e12 ms")
    return line


PERCENTILE = 0.9  # share of the requests that must be within each limit


class LatencyTargets(msgspec.Struct, frozen=True):
    """Limits in seconds for 90 % of the requests."""

    ttft: float
    tpot: float


class Forecast(msgspec.Struct, frozen=True):
    """The predicted latency of a layout at one rate, in seconds.

    Attributes:
        ttft: 90th percentile. Infinite if a queue grows without limit.
        tpot: 90th percentile.
        exhausted: resource that is too small for the load. "": none.
        rows: mean number of running requests of a decode node.
        prefill_busy: share of time spent on prefill.
        kv_used: share of a decode node's KV pool in use.
        link_busy: share of the busiest network port that hand-offs use.
    """

    ttft: float
    tpot: float
    exhausted: str = ""
    rows: float = 0.0
    prefill_busy: float = 0.0
    kv_used: float = 0.0
    link_busy: float = 0.0

    def bottleneck(self, targets: LatencyTargets) -> str:
        """Return the first resource or objective that limits the layout. "": none."""
        if self.exhausted:
            return self.exhausted
        if self.tpot > targets.tpot:
            return "TPOT"
        return "TTFT" if self.ttft > targets.ttft else ""
