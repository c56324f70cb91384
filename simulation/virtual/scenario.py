"""The file that `baton sim` reads: a cluster, its load, faults and the routing policy."""

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from common.config.router import Policy
from simulation.plan.traffic import TraceLine, trace_lines
from simulation.virtual.operations import Operation

_MAX_BYTES = 1 << 20
_LETTERS = range(ord("a"), ord("z") + 1)
_MOST_TOKENS = 1 << 20
_BLOCK_TOKENS = 512  # of a trace
Count = Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
Ranks = Literal[1, 2, 4, 8]
MAX_NODES = 256  # of each kind
Nodes = Annotated[int, Meta(ge=0, le=MAX_NODES)]
Positive = Annotated[float, Meta(gt=0, le=1e6)]
Requests = Annotated[int, Meta(ge=0, le=1_000_000)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping of the file. Unknown keys are refused by name."""


class ClusterSpec(_Record, frozen=True):
    """The nodes: `prefill` and `decode`, or `colocated`.

    Attributes:
        gpu: name of a GPU, or a file of `baton bench steps`.
        model: see `simulation.cost.models`.
        prefill_tp, decode_tp: GPUs of each node.
        path: the network of each node.
        options: of all nodes by their names, such as engine.cache.swap_pages.
    """

    gpu: str
    model: str
    prefill: Nodes = 0
    decode: Nodes = 0
    colocated: Nodes = 0
    prefill_tp: Ranks = 1
    decode_tp: Ranks = 1
    path: Literal["nvlink", "rdma400", "tcp100", "tcp25"] = "rdma400"
    options: dict[str, Any] = {}


class LoadSpec(_Record, frozen=True):
    """The requests.

    Attributes:
        rate: requests/s with Poisson arrivals, of `input` and `output` tokens.
        trace: file of JSON lines with timestamp (ms), input_length, output_length and hash_ids, in
            place of `rate`, `input` and `output`.
        requests: their number. With a trace, its first ones. 0: all.
        warm_up: first requests, which are not part of the figures.
        cool_down: last requests, which are not part of the figures. They keep the cluster busy
            until all others are complete.
    """

    rate: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    input: Count | None = None
    output: Count | None = None
    trace: str | None = None
    requests: Requests = 0
    warm_up: Requests = 0
    cool_down: Requests = 0


class Fault(_Record, frozen=True):
    """The failure of a node, named "prefill/0", "decode/1" or "colocated/0".

    Attributes:
        at: seconds after the begin of the load.
        kill: node that ends, as if killed.
        freeze: node whose engine stops for a time. Its frontend continues.
        seconds: of the freeze.
    """

    at: Annotated[float, Meta(ge=0, le=1e6)]
    kill: str | None = None
    freeze: str | None = None
    seconds: Annotated[float, Meta(gt=0, le=1e6)] | None = None


class PlannerSpec(_Record, frozen=True):
    """The options of `baton planner`, which acts on the cluster. None: the planner's default."""

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


class Arrival(msgspec.Struct, frozen=True):
    """A request.

    Attributes:
        at: seconds after the begin of the load.
        prompt: its tokens, a byte each.
        output: tokens of the response.
    """

    at: float
    prompt: bytes
    output: int


class Scenario(_Record, frozen=True):
    """A run. The same file always gives the same times."""

    cluster: ClusterSpec
    load: LoadSpec
    policy: Policy = "prefix_aware"
    faults: tuple[Fault, ...] = ()
    operations: tuple[Operation, ...] = ()
    planner: PlannerSpec | None = None
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 1

    @property
    def nodes(self) -> list[str]:
        """Return the names of all nodes."""
        numbers = (
            ("prefill", self.cluster.prefill),
            ("decode", self.cluster.decode),
            ("colocated", self.cluster.colocated),
        )
        return [f"{kind}/{index}" for kind, number in numbers for index in range(number)]

    def arrivals(self) -> Iterator[Arrival]:
        """Yield all requests in order of arrival. Raises ValueError if the trace is invalid."""
        rng = random.Random(self.seed)
        lines = self._drawn(rng) if self.load.trace is None else self._traced(Path(self.load.trace))
        for line in lines:
            num_blocks = -(-line.input_length // _BLOCK_TOKENS)
            shared = b"".join(_block(self.seed, block) for block in line.hash_ids[:num_blocks])
            rest = bytes(rng.choices(_LETTERS, k=max(0, line.input_length - len(shared))))
            prompt = (shared + rest)[: line.input_length]
            yield Arrival(line.timestamp / 1e3, prompt, line.output_length)

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
            yield TraceLine(load.input, load.output, 1e3 * at)


@lru_cache(maxsize=4096)
def _block(seed: int, block: int) -> bytes:
    """Return the tokens of a block of a trace. Equal blocks have equal tokens."""
    return bytes(random.Random(f"{seed}/{block}").choices(_LETTERS, k=_BLOCK_TOKENS))


def read(file: Path) -> Scenario:
    """Read a file.

    Raises:
        ValueError: it cannot be read, or a key or value is not supported. The error names it.
    """
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{file} is larger than {_MAX_BYTES >> 20} MiB")
        content: Any = yaml.safe_load(file.read_text())
        scenario = msgspec.convert(content, Scenario)
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
    if load.trace is not None and given:
        yield f"load.trace excludes {', '.join(f'load.{name}' for name in given)}"
    if load.trace is None and (len(given) < 3 or not load.requests):
        yield "load: expected trace, or rate, input, output and requests"
    if scenario.policy == "session_affinity":
        yield "policy: session_affinity is not supported: the requests of a load have no sessions"
    for operation in scenario.operations:
        if len(operation.nodes) != 1:
            yield "operations: expected one of set_role, drain and migrate"
        elif operation.nodes[0] not in scenario.nodes:
            yield f"operations: no node is called {operation.nodes[0]!r}: see cluster"
        if (operation.set_role is None) != (operation.role is None):
            yield "operations: set_role needs role, and only set_role has it"
    for fault in scenario.faults:
        if (fault.kill is None) == (fault.freeze is None):
            yield "faults: expected kill or freeze"
        if (fault.freeze is None) != (fault.seconds is None):
            yield "faults: freeze needs seconds, and only freeze has them"
        if (name := fault.kill or fault.freeze) not in scenario.nodes:
            yield f"faults: no node is called {name!r}: expected one of {scenario.nodes}"
