"""A run of a scenario from its begin to its report."""

import asyncio
import gc
import logging
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from common import logs
from common.config import DecodeConfig
from simulation.cost import StepCost
from simulation.virtual.clock import VirtualClock
from simulation.virtual.cluster import Response, VirtualCluster, running
from simulation.virtual.faults import Fault
from simulation.virtual.invariants import TracebackLog, of_responses, unrest
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
    tracebacks = TracebackLog()
    logging.getLogger().addHandler(tracebacks)
    cluster = scenario.cluster
    cost = StepCost.of(cluster.gpu, cluster.model, cluster.decode_tp)
    arrivals = list(scenario.arrivals())
    with (
        tempfile.TemporaryDirectory(prefix="baton-sim-") as directory,
        asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner,
    ):
        report = runner.run(_run(scenario, arrivals, cost, Path(directory)))
    return replace(report, violations=[*report.violations, *tracebacks.lines])


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
            await asyncio.gather(*faults, return_exceptions=True)
        busy_s = {name: node.busy_s - before[name] for name, node in cluster.nodes.items()}
        violations = [*of_responses(responses, _PAGE_SIZE), *await unrest(cluster)]
        return make_report(responses, begin, busy_s, cost, _PAGE_SIZE, violations)


async def _responses(
    cluster: VirtualCluster, arrivals: list[Arrival], begin: float
) -> list[Response]:
    asked = []
    for arrival in arrivals:
        await _until(begin + arrival.at)
        asked.append(asyncio.ensure_future(cluster.answer(arrival)))
    return await asyncio.gather(*asked)


async def _fail(cluster: VirtualCluster, fault: Fault, begin: float) -> None:
    await _until(begin + fault.at)
    await fault.strike(cluster)


async def _until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
