"""Chaos tests in virtual time: each seed draws a scenario. Failing scenarios are reduced.

Most draws are near a limit, where defects occur: small KV pools, few slots, small chunks, slow
networks, and clients that disconnect. Each run is a separate process, so that a scenario has the
same result as with `baton sim FILE`.
"""

import hashlib
import os
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import msgspec
import yaml
from msgspec.structs import replace

from common.config.router import Policy
from common.errors import ConfigError
from simulation.virtual.clock import VirtualClock, seed_all
from simulation.virtual.faults import (
    ROUTER,
    Cut,
    Fault,
    Freeze,
    HalfOpen,
    Kill,
    SlowDevice,
    SlowLink,
)
from simulation.virtual.loop import Deadlock
from simulation.virtual.operations import (
    Drain,
    Migrate,
    Pause,
    PauseMode,
    Role,
    SetRole,
    TimedCommand,
)
from simulation.virtual.run import MakePlanner, run
from simulation.virtual.scenario import (
    ClusterSpec,
    LoadSpec,
    NetworkPath,
    PlannerSpec,
    Scenario,
)

_TIMEOUT_S = 120.0  # seconds, far above any drawn load
_INPUTS = ((1, 100), (20, 900), (500, 3000))
_OUTPUTS = ((1, 8), (5, 60), (30, 150))
_POLICIES = tuple(name for name in get_args(Policy) if name != "session_affinity")
_STANDARD = None  # keep the default
# Values of options for all nodes.
_OPTIONS: dict[str, Sequence[Any]] = {
    "engine.scheduler.max_running_requests": (_STANDARD, _STANDARD, 2, 4, 8),
    "engine.scheduler.chunked_prefill_tokens": (_STANDARD, _STANDARD, 64, 256, 512),
    "engine.scheduler.retract_every": (_STANDARD, _STANDARD, 5, 30),
    "engine.scheduler.overlap_schedule": (_STANDARD, _STANDARD, _STANDARD, False),
    "engine.cache.swap_pages": (_STANDARD, _STANDARD, _STANDARD, 0, 20),
    "engine.cache.prefix_cache": (_STANDARD, _STANDARD, _STANDARD, _STANDARD, False),
}


def drawn(seed: int) -> Scenario:
    """Return the scenario of a seed.

    Node 0 of each kind is never killed, and only a planner changes its role.
    """
    rng = random.Random(f"chaos/{seed}")
    prompt, response = rng.choice(_INPUTS), rng.choice(_OUTPUTS)
    cluster = _cluster(rng, prompt[1] + response[1])
    requests = rng.randint(8, 30)
    load = LoadSpec(
        rate=round(rng.choice((3.0, 10.0, 40.0)) * rng.uniform(0.7, 1.4), 2),
        input=prompt,
        output=response,
        prefixes=rng.choice((0, 0, 1, 3)),
        requests=requests,
        timeout=_TIMEOUT_S,
        cancels=rng.choice((0.0, 0.0, 0.1, 0.4)),
        stops=rng.choice((0.0, 0.3, 1.0)),
    )
    scenario = Scenario(cluster, load, rng.choice(_POLICIES), seed=seed)
    seconds = requests / (load.rate or 1.0)
    planner = PlannerSpec(every_s=0.5, sustained_s=1.0, settle_s=1.0)
    planned = not cluster.colocated and rng.random() < 0.1
    mortal = [] if planned else [name for name in scenario.nodes if not name.endswith("/0")]
    faults = [_fault(rng, scenario.nodes, mortal, seconds) for _ in range(rng.randint(0, 4))]
    operations = [
        _operation(rng, scenario.nodes, mortal, seconds) for _ in range(rng.choice((0, 0, 1, 3)))
    ]
    return replace(
        scenario,
        faults=tuple(sorted(faults, key=lambda each: each.at)),
        operations=tuple(sorted(operations, key=lambda each: each.at)),
        planner=planner if planned else None,
    )


def _cluster(rng: random.Random, longest_tokens: int) -> ClusterSpec:
    """Draw a cluster for requests of at most `longest_tokens` tokens."""
    page_size = rng.choice((16, 16, 32))
    room = rng.choice((None, None, 1.3, 3.0))  # KV pool size, in longest requests
    chosen = {name: rng.choice(values) for name, values in _OPTIONS.items()}
    options = {name: value for name, value in chosen.items() if value is not _STANDARD}
    if page_size != 16:
        options["engine.cache.page_size"] = page_size
    if room is not None:
        options["engine.cache.num_pages"] = int(-(-longest_tokens // page_size) * room) + 2
    path: NetworkPath = rng.choice(get_args(NetworkPath))
    cluster = ClusterSpec("h100", "llama-3-8b", path=path, options=options)
    if rng.random() < 0.15:
        return replace(cluster, colocated=rng.randint(2, 3))
    return replace(cluster, prefill=rng.randint(1, 3), decode=rng.randint(1, 3))


def _fault(rng: random.Random, nodes: Sequence[str], mortal: Sequence[str], load_s: float) -> Fault:
    at = round(rng.uniform(0.0, load_s), 3)
    seconds = round(10 ** rng.uniform(-2.0, 1.3), 3)
    factor = round(10 ** rng.uniform(0.3, 1.5), 1)
    restart_s = rng.choice((None, seconds))
    node = rng.choice(nodes)
    one, other = rng.sample([*nodes, ROUTER], 2)
    kinds: list[Callable[[], Fault]] = [
        lambda: Freeze(node, at, seconds),
        lambda: SlowDevice(node, factor, at, seconds),
        lambda: Cut((one, other), at, seconds),
        lambda: HalfOpen((one, other), at, seconds),
        lambda: SlowLink((one, other), factor, at, seconds),
    ]
    if mortal:
        kinds += [lambda: Kill(rng.choice(mortal), at, restart_s)] * 2
    return rng.choice(kinds)()


def _operation(
    rng: random.Random, nodes: Sequence[str], mortal: Sequence[str], load_s: float
) -> TimedCommand:
    at = round(rng.uniform(0.0, load_s), 3)
    seconds = round(10 ** rng.uniform(-2.0, 1.0), 3)
    mode: PauseMode = rng.choice(get_args(PauseMode))
    node = rng.choice(nodes)
    decoding = [name for name in nodes if not name.startswith("prefill")]
    kinds: list[Callable[[], TimedCommand]] = [
        lambda: Pause(node, mode, at, seconds, optional=True),
        lambda: Migrate(rng.choice(decoding), at, optional=True),
    ]
    if mortal:
        role: Role = rng.choice(get_args(Role))
        kinds.append(lambda: Drain(rng.choice(mortal), at, optional=True))
        kinds.append(lambda: SetRole(rng.choice(mortal), role, at, optional=True))
    return rng.choice(kinds)()


_MOST_CPU_S = 120  # CPU seconds of a run. More is a violation


class Outcome(msgspec.Struct, frozen=True):
    """The result of a run.

    Attributes:
        violations: sentences, one for each rule that the run broke.
        hash: see RunReport. "": the run has no report.
        cpu_s: CPU seconds of the run.
    """

    violations: list[str]
    hash: str = ""
    cpu_s: float = 0.0


class Failure(msgspec.Struct, frozen=True):
    """A seed whose run broke a rule.

    Attributes:
        violations: violations of the reduced scenario.
        scenario: the reduced scenario, as a file for `baton sim`.
    """

    seed: int
    violations: list[str]
    scenario: str


class ChaosReport(msgspec.Struct, frozen=True):
    """The result of several seeds.

    Attributes:
        cpu_s: CPU seconds of the first run of each seed.
        hash: hash of all runs.
    """

    seeds: int
    failures: list[Failure]
    cpu_s: float
    hash: str


def search(
    first: int,
    number: int,
    run_one: Callable[[Scenario], Outcome],
    on_outcome: Callable[[int, Outcome], None],
) -> ChaosReport:
    """Run consecutive seeds. Reduce the scenario of each one that fails.

    Args:
        run_one: see `outcome_of`.
        on_outcome: called after the first run of each seed.
    """
    failures, cpu_s, digest = [], 0.0, hashlib.sha256()
    for seed in range(first, first + number):
        scenario = drawn(seed)
        outcome = run_one(scenario)
        on_outcome(seed, outcome)
        cpu_s += outcome.cpu_s
        digest.update(outcome.hash.encode())
        if outcome.violations:
            small, violations = reduced(
                scenario, outcome.violations, lambda smaller: run_one(smaller).violations
            )
            failures.append(Failure(seed, violations, as_yaml(small)))
    return ChaosReport(number, failures, cpu_s, digest.hexdigest()[:16])


def reduced(
    scenario: Scenario, violations: list[str], broken: Callable[[Scenario], list[str]]
) -> tuple[Scenario, list[str]]:
    """Remove faults and operations, then requests, while the scenario still breaks a rule.

    Requests are removed in halves first, and one by one last.

    Args:
        violations: violations of the scenario.
        broken: runs a scenario and returns its violations.

    Returns:
        The reduced scenario and its violations.
    """
    for without in _disturbances(scenario):
        smaller = without(scenario)
        if found := broken(smaller):
            scenario, violations = smaller, found
    load = scenario.load
    numbers = tuple(range(load.requests)) if load.only is None else load.only
    size = len(numbers) // 2
    while size:
        for begin in reversed(range(0, len(numbers), size)):
            left = numbers[:begin] + numbers[begin + size :]
            smaller = replace(scenario, load=replace(load, only=left))
            if left and (found := broken(smaller)):
                scenario, violations, numbers = smaller, found, left
        size //= 2
    return scenario, violations


def _disturbances(scenario: Scenario) -> Iterator[Callable[[Scenario], Scenario]]:
    """Yield functions that each remove one fault, one command or the planner from a scenario."""
    for fault in scenario.faults:
        yield partial(_without, "faults", fault)
    for operation in scenario.operations:
        yield partial(_without, "operations", operation)
    if scenario.planner is not None:
        yield lambda left: replace(left, planner=None)


def _without(field: str, item: Fault | TimedCommand, scenario: Scenario) -> Scenario:
    left = tuple(each for each in getattr(scenario, field) if each is not item)
    return replace(scenario, **{field: left})


def outcome_of(
    clock: VirtualClock, make_planner: MakePlanner | None, scenario: Scenario
) -> Outcome:
    """Run a scenario in a child process.

    Args:
        clock: installed, and never moved.
        make_planner: see `run`.
    """
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        _run_child(clock, make_planner, scenario, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status, used = os.wait4(child, 0)
    cpu_s = used.ru_utime + used.ru_stime
    if status:
        code = os.waitstatus_to_exitcode(status)
        return Outcome([f"the simulation ended with exit code {code}"], cpu_s=cpu_s)
    return replace(msgspec.json.decode(content, type=Outcome), cpu_s=cpu_s)


def _run_child(
    clock: VirtualClock, make_planner: MakePlanner | None, scenario: Scenario, writing: int
) -> None:
    """Run a scenario, write its Outcome to `writing`, and exit."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the log, which `baton sim FILE` shows
        seed_all(scenario.seed)
        try:
            report: Any = run(scenario, clock, make_planner)
            outcome = Outcome(report.violations, report.hash)
        except (Deadlock, ConfigError, ValueError) as error:
            outcome = Outcome([str(error).partition("\n")[0]])
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(msgspec.json.encode(outcome))
        code = 0
    finally:
        os._exit(code)


def as_yaml(scenario: Scenario) -> str:
    """Return the file of a scenario."""
    content = msgspec.to_builtins(scenario)
    text: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
    return text


def lines(report: ChaosReport) -> Iterator[str]:
    """Yield the lines of a report for a terminal."""
    for failure in report.failures:
        yield f"seed {failure.seed} fails. This file repeats it with `baton sim FILE`:"
        yield from (f"# {each}" for each in failure.violations)
        yield failure.scenario
    yield (
        f"{report.seeds} seeds, {len(report.failures)} failed, {report.cpu_s:.1f} s of CPU, "
        f"hash {report.hash}"
    )
