"""A run of a scenario from its begin to its report."""

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from common import logs
from simulation.cost import StepCost
from simulation.virtual.clock import VirtualClock
from simulation.virtual.cluster import ROUTER, Response, VirtualCluster, running
from simulation.virtual.loop import VirtualLoop
from simulation.virtual.operations import Operation
from simulation.virtual.report import RunReport, make_report
from simulation.virtual.scenario import Arrival, Fault, Scenario

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
    cluster = scenario.cluster
    cost = StepCost.of(cluster.gpu, cluster.model, cluster.decode_tp)
    arrivals = list(scenario.arrivals())
    planner = None
    if scenario.planner is not None:
        if make_planner is None:
            raise ValueError("planner: only `baton sim` supports it")
        planner = make_planner(scenario.planner.flags, ROUTER)
    with (
        tempfile.TemporaryDirectory(prefix="baton-sim-") as directory,
        asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner,
    ):
        return runner.run(_run(scenario, arrivals, cost, planner, Path(directory)))


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
    numbered = list(enumerate(arrivals))
    async with running(scenario, directory) as cluster:
        await cluster.until_ready()
        gc.freeze()
        begin = time.monotonic()
        beside = _beside(cluster, scenario, planner, begin)
        try:
            warm_up = await _send(cluster, numbered[:first], begin)
            await _until(begin + arrivals[first].at if first else begin)
            counted_from = time.monotonic()
            before = {name: node.busy_s for name, node in cluster.nodes.items()}
            asked = await _send(cluster, numbered[first:end], begin)
            cool_down = asyncio.ensure_future(_send(cluster, numbered[end:], begin))
            responses = await asyncio.gather(*asked)
            for each in beside:
                if each.done():
                    each.result()
        finally:
            for each in beside:
                each.cancel()
        for unfinished in (cool_down, *warm_up):
            unfinished.cancel()
        busy_s = {name: node.busy_s - before[name] for name, node in cluster.nodes.items()}
        page_size = cluster.page_size
        return make_report(responses, counted_from, busy_s, cluster.roles, cost, page_size)


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
    return [asyncio.ensure_future(each) for each in work]


async def _send(
    cluster: VirtualCluster, numbered: Sequence[tuple[int, Arrival]], begin: float
) -> list[asyncio.Task[Response]]:
    """Send requests, each at its time."""
    asked = []
    for number, arrival in numbered:
        await _until(begin + arrival.at)
        asked.append(asyncio.ensure_future(cluster.answer(arrival, f"request-{number}")))
    return asked


async def _fail(cluster: VirtualCluster, fault: Fault, begin: float) -> None:
    await _until(begin + fault.at)
    if fault.kill is not None:
        await cluster.nodes[fault.kill].kill()
    elif fault.freeze is not None and fault.seconds is not None:
        await cluster.nodes[fault.freeze].freeze(fault.seconds)


async def _operate(cluster: VirtualCluster, operation: Operation, begin: float) -> None:
    await _until(begin + operation.at)
    await operation.carry_out(cluster)


async def _until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
