"""Chaos by seed: clusters, loads and faults drawn by a seed, and reduced if a run breaks a rule.

Each run is a process of its own, so that a scenario has the same result as with `baton sim FILE`.
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
from simulation.virtual.run import run
from simulation.virtual.scenario import ClusterSpec, LoadSpec, NetworkPath, Scenario

_MOST_CPU_S = 120  # of a run. A run beyond it is a violation
_TIMEOUT_S = 120.0  # of a request. No drawn load comes near it
_PAGE_TOKENS = 16
_INPUTS = ((1, 100), (20, 900), (500, 3000))
_OUTPUTS = ((1, 8), (5, 60), (30, 150))
_POLICIES = tuple(name for name in get_args(Policy) if name != "session_affinity")


class Outcome(msgspec.Struct, frozen=True):
    """The end of a run.

    Attributes:
        violations: sentences, one for each rule that the run broke.
        hash: see RunReport. "": the run has no report.
        cpu_s: CPU time of the run.
    """

    violations: list[str]
    hash: str = ""
    cpu_s: float = 0.0


class Failure(msgspec.Struct, frozen=True):
    """A seed whose run broke a rule.

    Attributes:
        violations: of the reduced scenario.
        scenario: the reduced scenario, as a file for `baton sim`.
    """

    seed: int
    violations: list[str]
    scenario: str


class ChaosReport(msgspec.Struct, frozen=True):
    """The result of several seeds.

    Attributes:
        cpu_s: of the first run of each seed.
        hash: of all runs.
    """

    seeds: int
    failures: list[Failure]
    cpu_s: float
    hash: str


def drawn(seed: int) -> Scenario:
    """Return the scenario of a seed. Node 0 of each kind is never killed."""
    rng = random.Random(f"chaos/{seed}")
    prompt, response = rng.choice(_INPUTS), rng.choice(_OUTPUTS)
    longest_pages = -(-(prompt[1] + response[1]) // _PAGE_TOKENS)
    room = rng.choice((None, None, 1.3, 3.0))  # for so many of the longest requests
    path: NetworkPath = rng.choice(get_args(NetworkPath))
    pages = {} if room is None else {"engine.cache.num_pages": int(longest_pages * room) + 2}
    cluster = ClusterSpec("h100", "llama-3-8b", path=path, options=pages)
    if rng.random() < 0.15:
        cluster = replace(cluster, colocated=rng.randint(2, 3))
    else:
        cluster = replace(cluster, prefill=rng.randint(1, 3), decode=rng.randint(1, 3))
    requests = rng.randint(8, 30)
    load = LoadSpec(
        rate=round(rng.choice((3.0, 10.0, 40.0)) * rng.uniform(0.7, 1.4), 2),
        input=prompt,
        output=response,
        prefixes=rng.choice((0, 0, 1, 3)),
        requests=requests,
        timeout=_TIMEOUT_S,
    )
    scenario = Scenario(cluster, load, rng.choice(_POLICIES), seed=seed)
    seconds = requests / (load.rate or 1.0)
    faults = (_fault(rng, scenario.nodes, seconds) for _ in range(rng.randint(0, 4)))
    return replace(scenario, faults=tuple(sorted(faults, key=lambda each: each.at)))


def _fault(rng: random.Random, nodes: Sequence[str], load_s: float) -> Fault:
    at = round(rng.uniform(0.0, load_s), 3)
    seconds = round(10 ** rng.uniform(-2.0, 1.3), 3)
    factor = round(10 ** rng.uniform(0.3, 1.5), 1)
    node = rng.choice(nodes)
    one, other = rng.sample([*nodes, ROUTER], 2)
    mortal = [name for name in nodes if not name.endswith("/0")]
    kinds: list[Callable[[], Fault]] = [
        lambda: Freeze(node, at, seconds),
        lambda: SlowDevice(node, factor, at, seconds),
        lambda: Cut((one, other), at, seconds),
        lambda: HalfOpen((one, other), at, seconds),
        lambda: SlowLink((one, other), factor, at, seconds),
    ]
    if mortal:
        kinds += [lambda: Kill(rng.choice(mortal), at)] * 2
    return rng.choice(kinds)()


def search(
    first: int, number: int, clock: VirtualClock, on_outcome: Callable[[int, Outcome], None]
) -> ChaosReport:
    """Run consecutive seeds. Reduce the scenario of each one that fails.

    Args:
        clock: installed.
        on_outcome: called after the first run of each seed.
    """
    failures, cpu_s, digest = [], 0.0, hashlib.sha256()
    for seed in range(first, first + number):
        scenario = drawn(seed)
        outcome = outcome_of(scenario, clock)
        on_outcome(seed, outcome)
        cpu_s += outcome.cpu_s
        digest.update(outcome.hash.encode())
        if outcome.violations:
            small, violations = reduced(scenario, outcome.violations, partial(_broken, clock))
            failures.append(Failure(seed, violations, as_yaml(small)))
    return ChaosReport(number, failures, cpu_s, digest.hexdigest()[:16])


def reduced(
    scenario: Scenario, violations: list[str], broken: Callable[[Scenario], list[str]]
) -> tuple[Scenario, list[str]]:
    """Remove faults, then requests, while a scenario still breaks a rule. Requests go in halves
    first and one by one last.

    Args:
        violations: of the scenario.
        broken: runs a scenario and returns its violations.
    Returns:
        The reduced scenario and its violations.
    """
    for fault in scenario.faults:
        faults = tuple(each for each in scenario.faults if each is not fault)
        smaller = replace(scenario, faults=faults)
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


def _broken(clock: VirtualClock, scenario: Scenario) -> list[str]:
    return outcome_of(scenario, clock).violations


def outcome_of(scenario: Scenario, clock: VirtualClock) -> Outcome:
    """Run a scenario in a child of this process.

    Args:
        clock: installed, and never moved.
    """
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        _run_child(scenario, clock, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status, used = os.wait4(child, 0)
    cpu_s = used.ru_utime + used.ru_stime
    if status:
        code = os.waitstatus_to_exitcode(status)
        return Outcome([f"the simulation ended with exit code {code}"], cpu_s=cpu_s)
    return replace(msgspec.json.decode(content, type=Outcome), cpu_s=cpu_s)


def _run_child(scenario: Scenario, clock: VirtualClock, writing: int) -> None:
    """Run a scenario, write its Outcome, and end this process."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the log. `baton sim FILE` shows it
        seed_all(scenario.seed)
        try:
            report: Any = run(scenario, clock)
            outcome = Outcome(report.violations, report.hash)
        except Deadlock as error:
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
