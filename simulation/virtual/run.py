"""A run of a scenario from its begin to its report."""

import asyncio
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import logs
from simulation.cost import StepCost
from simulation.virtual.clock import VirtualClock
from simulation.virtual.cluster import Response, VirtualCluster, running
from simulation.virtual.loop import VirtualLoop
from simulation.virtual.operations import Operation
from simulation.virtual.report import RunReport, make_report
from simulation.virtual.scenario import Arrival, Fault, Scenario

NAME = "sim"


def run(scenario: Scenario, clock: VirtualClock) -> RunReport:
    """Run a scenario to its end.

    Args:
        clock: installed.
    Raises:
        ConfigError: nodes do not support the scenario.
        ValueError: the trace or the GPU is invalid.
    """
    logs.setup(NAME, "error", "text")
    cluster = scenario.cluster
    cost = StepCost.of(cluster.gpu, cluster.model, cluster.decode_tp)
    arrivals = list(scenario.arrivals())
    with (
        tempfile.TemporaryDirectory(prefix="baton-sim-") as directory,
        asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner,
    ):
        return runner.run(_run(scenario, arrivals, cost, Path(directory)))


async def _run(
    scenario: Scenario, arrivals: list[Arrival], cost: StepCost, directory: Path
) -> RunReport:
    first, end = scenario.load.warm_up, len(arrivals) - scenario.load.cool_down
    if first >= end:
        raise ValueError(f"load: no request of {len(arrivals)} is left for the figures")
    numbered = list(enumerate(arrivals))
    async with running(scenario, directory) as cluster:
        await cluster.until_ready()
        gc.freeze()
        begin = time.monotonic()
        others: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(_fail(cluster, each, begin)) for each in scenario.faults
        ]
        operations = [
            asyncio.ensure_future(_operate(cluster, each, begin)) for each in scenario.operations
        ]
        others += operations
        try:
            others += await _send(cluster, numbered[:first], begin)
            await _until(begin + arrivals[first].at if first else begin)
            counted_from = time.monotonic()
            before = {name: node.busy_s for name, node in cluster.nodes.items()}
            asked = await _send(cluster, numbered[first:end], begin)
            others.append(asyncio.ensure_future(_send(cluster, numbered[end:], begin)))
            responses = await asyncio.gather(*asked)
            for each in operations:
                if each.done():
                    each.result()
        finally:
            for other in others:
                other.cancel()
        busy_s = {name: node.busy_s - before[name] for name, node in cluster.nodes.items()}
        return make_report(responses, counted_from, busy_s, cost, cluster.page_size)


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
