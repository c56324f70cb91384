"""The file that `baton sim` reads: cluster, load, routing policy, faults and commands."""

import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from common.config.router import Policy
from simulation.plan.traffic import TraceLine, trace_lines
from simulation.virtual.faults import KINDS, ROUTER, Fault, Record, record_of, targets
from simulation.virtual.operations import COMMANDS, TimedCommand, node_of

_MAX_BYTES = 1 << 20
_LETTERS = range(ord("a"), ord("z") + 1)
_MOST_TOKENS = 1 << 20
_BLOCK_TOKENS = 512  # block size of a trace
Range = tuple[int, int]
Ranks = Literal[1, 2, 4, 8]
NetworkPath = Literal["nvlink", "rdma400", "tcp100", "tcp25"]
MAX_NODES = 256  # nodes of each kind
Nodes = Annotated[int, Meta(ge=0, le=MAX_NODES)]
Positive = Annotated[float, Meta(gt=0, le=1e6)]
Requests = Annotated[int, Meta(ge=0, le=1_000_000)]
Share = Annotated[float, Meta(ge=0, le=1)]


class ClusterSpec(Record, frozen=True):
    """The nodes: `prefill` and `decode`, or `colocated`.

    Attributes:
        gpu: name of a GPU, or a file of `baton bench steps`.
        model: see `simulation.cost.models`.
        prefill_tp, decode_tp: GPUs of each node.
        path: data path of each node.
        options: options of all nodes by name, such as engine.cache.num_pages.
    """

    gpu: str
    model: str
    prefill: Nodes = 0
    decode: Nodes = 0
    colocated: Nodes = 0
    prefill_tp: Ranks = 1
    decode_tp: Ranks = 1
    path: NetworkPath = "rdma400"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class LoadSpec(Record, frozen=True):
    """The requests.

    Attributes:
        rate: requests/s with Poisson arrivals, of `input` and `output` tokens. A pair is a range.
        prefixes: number of 512-token texts. Each prompt begins with one of them. 0: none.
        trace: file of JSON lines with timestamp (ms), input_length, output_length and hash_ids,
            instead of `rate`, `input` and `output`.
        requests: number of requests. With a trace, the first ones. 0: all.
        warm_up: number of first requests that do not count in figures.
        cool_down: number of last requests that do not count in figures. They keep the cluster busy
            until all others are complete.
        only: numbers of the requests to send. None: all.
        timeout: seconds for a complete request.
        cancels: share of requests whose clients disconnect at a random time, one millisecond to ten
            seconds after sending.
        stops: share of requests that end at a random letter, if the response has it.
    """

    rate: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    input: int | Range | None = None
    output: int | Range | None = None
    prefixes: Annotated[int, Meta(ge=0, le=1000)] = 0
    trace: str | None = None
    requests: Requests = 0
    only: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    warm_up: Requests = 0
    cool_down: Requests = 0
    timeout: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    cancels: Share = 0.0
    stops: Share = 0.0


class PlannerSpec(Record, frozen=True):
    """Options of `baton planner`, which acts on the cluster. None: the planner's default."""

    every_s: Positive | None = None
    queued_s: Positive | None = None
    occupied: Positive | None = None
    spare: Positive | None = None
    sustained_s: Positive | None = None
    settle_s: Positive | None = None
    running: Annotated[int, Meta(ge=0)] | None = None

    @property
    def flags(self) -> list[str]:
        given = msgspec.structs.asdict(self).items()
        return [f"--{name.replace('_', '-')}={value}" for name, value in given if value is not None]


class LatencyLimits(Record, frozen=True):
    """Latency limits of one request in seconds, for goodput."""

    ttft: Positive
    tpot: Positive


class Arrival(msgspec.Struct, frozen=True):
    """A request and its time.

    Attributes:
        number: index of the request in the load.
        at: seconds after the start of the load.
        prompt: tokens of the prompt, a byte each.
        output: maximum tokens of the response.
        leaves_s: seconds after which the client cancels it. None: it waits for the response.
        stop: token that ends the response. None: it has all its tokens.
    """

    number: int
    at: float
    prompt: bytes
    output: int
    leaves_s: float | None = None
    stop: int | None = None

    @property
    def name(self) -> str:
        return f"request-{self.number}"


class Scenario(Record, frozen=True):
    """All inputs of a run. The same file always gives the same times."""

    cluster: ClusterSpec
    load: LoadSpec
    policy: Policy = "prefix_aware"
    faults: tuple[Fault, ...] = ()
    operations: tuple[TimedCommand, ...] = ()
    planner: PlannerSpec | None = None
    limits: LatencyLimits | None = None
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 1

    @property
    def nodes(self) -> list[str]:
        numbers = (
            ("prefill", self.cluster.prefill),
            ("decode", self.cluster.decode),
            ("colocated", self.cluster.colocated),
        )
        return [f"{kind}/{index}" for kind, number in numbers for index in range(number)]

    def arrivals(self) -> Iterator[Arrival]:
        """Yield all requests in order of arrival. Raises ValueError if the trace is invalid."""
        rng, ends = random.Random(self.seed), random.Random(f"{self.seed}/ends")
        lines = self._drawn(rng) if self.load.trace is None else self._traced(Path(self.load.trace))
        only = None if self.load.only is None else frozenset(self.load.only)
        for number, line in enumerate(lines):
            num_blocks = -(-line.input_length // _BLOCK_TOKENS)
            shared = b"".join(_block(self.seed, block) for block in line.hash_ids[:num_blocks])
            rest = bytes(rng.choices(_LETTERS, k=max(0, line.input_length - len(shared))))
            prompt = (shared + rest)[: line.input_length]
            leaves_s, stop = self._early_end(ends)
            if only is None or number in only:
                at, output = line.timestamp / 1e3, line.output_length
                yield Arrival(number, at, prompt, output, leaves_s, stop)

    def _early_end(self, rng: random.Random) -> tuple[float | None, int | None]:
        """Draw `leaves_s` and `stop` of the next request."""
        leaves, stops = rng.random() < self.load.cancels, rng.random() < self.load.stops
        leaves_s, letter = 10 ** rng.uniform(-3.0, 1.0), rng.choice(_LETTERS)
        return (leaves_s if leaves else None, letter if stops else None)

    def _traced(self, file: Path) -> Iterator[TraceLine]:
        lines = islice(trace_lines(file), self.load.requests or None)
        in_order = sorted(lines, key=lambda line: line.timestamp)
        for line in in_order:
            if max(line.input_length, line.output_length) > _MOST_TOKENS:
                raise ValueError(f"{file} has a request of more than {_MOST_TOKENS} tokens")
            begin = in_order[0].timestamp
            yield msgspec.structs.replace(line, timestamp=line.timestamp - begin)

    def _drawn(self, rng: random.Random) -> Iterator[TraceLine]:
        load = self.load
        assert load.rate is not None and load.input is not None and load.output is not None
        at = 0.0
        for _ in range(load.requests):
            at += rng.expovariate(load.rate)
            shared = [rng.randrange(load.prefixes)] if load.prefixes else []
            yield TraceLine(_count(load.input, rng), _count(load.output, rng), 1e3 * at, shared)


def _count(value: int | Range, rng: random.Random) -> int:
    return value if isinstance(value, int) else rng.randint(*value)


@lru_cache(maxsize=4096)
def _block(seed: int, block: int) -> bytes:
    """Return the tokens of a block of a trace. Equal blocks have equal tokens."""
    return bytes(random.Random(f"{seed}/{block}").choices(_LETTERS, k=_BLOCK_TOKENS))


_RECORDS: dict[type, Mapping[str, type[Record]]] = {Fault: KINDS, TimedCommand: COMMANDS}


def read(file: Path) -> Scenario:
    """Read a file. Raise ValueError, which names the problem, if it cannot be used."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{file} is larger than {_MAX_BYTES >> 20} MiB")
        content: Any = yaml.safe_load(file.read_text())
        scenario = msgspec.convert(
            content, Scenario, dec_hook=lambda kind, content: record_of(content, _RECORDS[kind])
        )
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (msgspec.ValidationError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error
    for problem in _problems(scenario):
        raise ValueError(f"{file}: {problem}")
    return scenario


def _problems(scenario: Scenario) -> Iterator[str]:
    cluster, load = scenario.cluster, scenario.load
    if cluster.colocated and (cluster.prefill or cluster.decode):
        yield "cluster.colocated excludes cluster.prefill and cluster.decode"
    if not cluster.colocated and not (cluster.prefill and cluster.decode):
        yield "cluster: expected prefill and decode, or colocated, each at least 1"
    if cluster.prefill_tp > 1 and not cluster.prefill:
        yield "cluster.prefill_tp is not used without cluster.prefill"
    given = [name for name in ("rate", "input", "output") if getattr(load, name) is not None]
    for name in ("input", "output"):  # msgspec cannot limit the members of this union
        value = getattr(load, name)
        if value is None:
            continue
        least, most = value if isinstance(value, tuple) else (value, value)
        if not 1 <= least <= most <= _MOST_TOKENS:
            yield f"load.{name}: expected 1 to {_MOST_TOKENS}, or a range of such numbers"
    if load.trace is not None and load.prefixes:
        yield "load.trace excludes load.prefixes"
    if load.trace is not None and given:
        yield f"load.trace excludes {', '.join(f'load.{name}' for name in given)}"
    if load.trace is None and (len(given) < 3 or not load.requests):
        yield "load: expected trace, or rate, input, output and requests"
    if scenario.policy == "session_affinity":
        yield "policy: session_affinity is not supported: the requests of a load have no sessions"
    yield from _of_operations(scenario)
    yield from _of_faults(scenario)


def _of_operations(scenario: Scenario) -> Iterator[str]:
    for index, operation in enumerate(scenario.operations):
        if (name := node_of(operation)) not in scenario.nodes:
            yield f"operations[{index}]: {name!r} does not exist: expected one of {scenario.nodes}"


def _of_faults(scenario: Scenario) -> Iterator[str]:
    for index, fault in enumerate(scenario.faults):
        names = targets(fault)
        known = scenario.nodes if len(names) == 1 else [*scenario.nodes, ROUTER]
        for name in names:
            if name not in known:
                yield f"faults[{index}]: {name!r} does not exist: expected one of {known}"
        if len(set(names)) < len(names):
            yield f"faults[{index}]: expected two different processes, not {names[0]!r} twice"
