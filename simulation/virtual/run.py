"""A run of a scenario from its begin to its report."""

import asyncio
import gc
import tempfile
import time
from pathlib import Path

from common import logs
from common.config import DecodeConfig
from simulation.cost import StepCost
from simulation.virtual.clock import VirtualClock
from simulation.virtual.cluster import Response, VirtualCluster, running
from simulation.virtual.faults import Fault
from simulation.virtual.loop import VirtualLoop
from simulation.virtual.report import RunReport, make_report
from simulation.virtual.scenario import Arrival, Scenario

NAME = "sim"
_PAGE_SIZE = DecodeConfig.model_validate({"engine": {"model": ""}}).engine.cache.page_size


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
    async with running(scenario, directory) as cluster:
        await cluster.until_ready()
        gc.freeze()
        begin = time.monotonic()
        before = {name: node.busy_s for name, node in cluster.nodes.items()}
        faults = [asyncio.ensure_future(_fail(cluster, each, begin)) for each in scenario.faults]
        try:
            responses = await _responses(cluster, arrivals, begin)
        finally:
            for each in faults:
                each.cancel()
        busy_s = {name: node.busy_s - before[name] for name, node in cluster.nodes.items()}
        return make_report(responses, begin, busy_s, cost, _PAGE_SIZE)


async def _responses(
    cluster: VirtualCluster, arrivals: list[Arrival], begin: float
) -> list[Response]:
    asked = []
    for index, arrival in enumerate(arrivals):
        await _until(begin + arrival.at)
        asked.append(asyncio.ensure_future(cluster.answer(arrival, f"request-{index}")))
    return await asyncio.gather(*asked)


async def _fail(cluster: VirtualCluster, fault: Fault, begin: float) -> None:
    await _until(begin + fault.at)
    await fault.strike(cluster)


async def _until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
