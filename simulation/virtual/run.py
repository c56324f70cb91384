"""A run of a scenario from its begin to its report."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from common import logs, rpc
from simulation.cost import StepCost
from simulation.virtual.clock import VirtualClock
from simulation.virtual.cluster import ROUTER_ADDRESS, Response, VirtualCluster, running
from simulation.virtual.faults import Fault
from simulation.virtual.invariants import TracebackLog, of_responses, unrest, wrong_places
from simulation.virtual.loop import VirtualLoop
from simulation.virtual.operations import Operation, carry_out
from simulation.virtual.report import RunReport, make_report
from simulation.virtual.scenario import Arrival, Scenario
from simulation.virtual.scratch import scratch_directory

NAME = "sim"
# Returns a planner by its flags and the address of the router. It runs until it is cancelled.
MakePlanner = Callable[[Sequence[str], str], Callable[[], Coroutine[Any, Any, None]]]


def run(
    scenario: Scenario, clock: VirtualClock, make_planner: MakePlanner | None = None
) -> RunReport:
    """Run a scenario to its end.

    Args:
        clock: installed.
        make_planner: None: planners are not supported.
    Raises:
        ConfigError: nodes do not support the scenario.
        ValueError: the trace or the GPU is invalid.
    """
    logs.setup(NAME, "error", "text")
    tracebacks = TracebackLog()
    logging.getLogger().addHandler(tracebacks)
    cluster = scenario.cluster
    cost = StepCost.of(cluster.gpu, cluster.model, cluster.decode_tp)
    arrivals = list(scenario.arrivals())
    planner = None
    if scenario.planner is not None:
        if make_planner is None:
            raise ValueError("planner: only `baton sim` supports it")
        planner = make_planner(scenario.planner.flags, ROUTER_ADDRESS)
    with (
        scratch_directory() as directory,
        asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner,
    ):
        report = runner.run(_run(scenario, arrivals, cost, planner, directory))
    return replace(report, violations=[*report.violations, *tracebacks.lines])


async def _run(
    scenario: Scenario,
    arrivals: list[Arrival],
    cost: StepCost,
    planner: Callable[[], Coroutine[Any, Any, None]] | None,
    directory: Path,
) -> RunReport:
    first, end = scenario.load.warm_up, len(arrivals) - scenario.load.cool_down
    if first >= end:
        raise ValueError(f"load: no request of {len(arrivals)} is left for the figures")
    async with running(scenario, directory) as cluster:
        await cluster.until_ready()
        gc.freeze()
        begin = time.monotonic()
        beside = _beside(cluster, scenario, planner, begin)
        sent: list[asyncio.Task[Response]] = []
        try:
            await _send(cluster, arrivals[:first], begin, sent)
            await _until(begin + arrivals[first].at if first else begin)
            counted_from = time.monotonic()
            before = {name: node.busy_s for name, node in cluster.nodes.items()}
            await _send(cluster, arrivals[first:end], begin, sent)
            beside.append(asyncio.ensure_future(_send(cluster, arrivals[end:], begin, sent)))
            responses = await asyncio.gather(*sent[first:end])
            for each in beside:
                if each.done():
                    each.result()
            busy_s = {name: node.busy_s - before[name] for name, node in cluster.nodes.items()}
        finally:
            for task in (*beside, *sent):
                task.cancel()
            await asyncio.gather(*beside, *sent, return_exceptions=True)
        ended = [each.result() for each in sent if not each.cancelled()]
        wrong = wrong_places(ended, cost.kv.tables(cluster.page_size))
        violations = [*of_responses(ended, wrong), *await unrest(cluster)]
        return make_report(
            responses,
            counted_from,
            busy_s,
            cluster.roles,
            scenario.limits,
            cost,
            wrong,
            violations,
        )


def _beside(
    cluster: VirtualCluster,
    scenario: Scenario,
    planner: Callable[[], Coroutine[Any, Any, None]] | None,
    begin: float,
) -> list[asyncio.Task[None]]:
    """Begin everything that happens beside the load."""
    work = [_fail(cluster, each, begin) for each in scenario.faults]
    work += [_operate(cluster, each, begin) for each in scenario.operations]
    if planner is not None:
        work.append(planner())
    with rpc.use(cluster.operator):
        return [asyncio.ensure_future(each) for each in work]


async def _send(
    cluster: VirtualCluster,
    arrivals: Sequence[Arrival],
    begin: float,
    sent: list[asyncio.Task[Response]],
) -> None:
    """Send requests, each at its time. Append their tasks to `sent`."""
    for arrival in arrivals:
        await _until(begin + arrival.at)
        sent.append(asyncio.ensure_future(cluster.answer(arrival)))


async def _fail(cluster: VirtualCluster, fault: Fault, begin: float) -> None:
    await _until(begin + fault.at)
    await fault.strike(cluster)


async def _operate(cluster: VirtualCluster, operation: Operation, begin: float) -> None:
    await _until(begin + operation.at)
    await carry_out(operation, cluster)


async def _until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
