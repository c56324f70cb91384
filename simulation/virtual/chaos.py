"""Runs of seeds, whose scenarios are reduced if they break a rule.

Each run is a process of its own, so that a scenario has the same result as with `baton sim FILE`.
"""

import hashlib
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from common.errors import ConfigError
from simulation.virtual.clock import VirtualClock, seed_all
from simulation.virtual.draw import drawn
from simulation.virtual.faults import Fault
from simulation.virtual.loop import Deadlock
from simulation.virtual.operations import Operation
from simulation.virtual.run import MakePlanner, run
from simulation.virtual.scenario import Scenario

_MOST_CPU_S = 120  # of a run. A run beyond it is a violation


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
    """Remove faults and operations, then requests, while a scenario still breaks a rule. Requests
    go in halves first and one by one last.

    Args:
        violations: of the scenario.
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
    """Yield what removes each fault, each command and the planner from a scenario."""
    for fault in scenario.faults:
        yield partial(_without, "faults", fault)
    for operation in scenario.operations:
        yield partial(_without, "operations", operation)
    if scenario.planner is not None:
        yield lambda left: replace(left, planner=None)


def _without(field: str, item: Fault | Operation, scenario: Scenario) -> Scenario:
    """Return the scenario without one of its faults or operations."""
    left = tuple(each for each in getattr(scenario, field) if each is not item)
    return replace(scenario, **{field: left})


def outcome_of(
    clock: VirtualClock, make_planner: MakePlanner | None, scenario: Scenario
) -> Outcome:
    """Run a scenario in a child of this process.

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
    """Run a scenario, write its Outcome, and end this process."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the log. `baton sim FILE` shows it
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
