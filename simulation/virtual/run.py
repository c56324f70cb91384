"""A run of a scenario from start to report, with the rules that every run must keep.

Its directory holds page pools and the router's files. The next run deletes the directories of
killed runs.
"""

import asyncio
import fcntl
import gc
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from common import logs, rpc
from common.page_tables import PageTables
from router.cluster.cluster_state import NodeReport
from simulation.cost import StepCost
from simulation.device.witness import expected_tokens
from simulation.node.pools import delete_unused
from simulation.virtual.clock import VirtualClock
from simulation.virtual.cluster import ROUTER_ADDRESS, Response, VirtualCluster, running
from simulation.virtual.faults import Fault
from simulation.virtual.loop import VirtualLoop
from simulation.virtual.operations import TimedCommand, carry_out
from simulation.virtual.report import RunReport, make_report
from simulation.virtual.scenario import Arrival, Scenario

RECOVERY_S = 60.0  # seconds after the last request and fault until all must be idle
_IDLE_PAGES = ("free", "cache")  # holders of pages on a node without requests
# Errors that show a defect instead of a failure of a node, see common/errors.py.
_INTERNAL = ("RequestFailed", "EngineFault", "ProtocolViolation", "InvalidRequest", "ConfigError")


class TracebackLog(logging.Handler):
    """Keeps the first line of each log record with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            self.lines.append(f"{record.getMessage()}: {type(error).__name__}: {error}")


def wrong_places(responses: Sequence[Response], tables: PageTables) -> dict[str, int]:
    """Return the index of the first wrong token of each wrong response, by its name."""
    places = ((each.arrival.name, _wrong_place(each, tables)) for each in responses)
    return {name: place for name, place in places if place is not None}


def _wrong_place(response: Response, tables: PageTables) -> int | None:
    """Return the index of the first token that differs from the oracle's. None: all are right."""
    arrival, found = response.arrival, response.token_ids
    expected = expected_tokens(list(arrival.prompt), arrival.output, tables)
    if arrival.stop in expected:
        expected = expected[: expected.index(arrival.stop) + 1]
    if response.error:
        expected = expected[: len(found)]
    if found == expected:
        return None
    pairs = enumerate(zip(found, expected, strict=False))
    shorter = min(len(found), len(expected))
    return next((place for place, (token, right) in pairs if token != right), shorter)


def of_responses(responses: Sequence[Response], wrong: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each response that is wrong, hangs, or failed with an internal error.

    Args:
        wrong: see wrong_places.
    """
    for each in responses:
        name = each.arrival.name
        if name in wrong:
            yield f"{name}: the response is wrong from token {wrong[name]} on"
        if each.error == "TimeoutError":
            last = max((each.sent_at, *each.times))
            if each.ended_at - last > RECOVERY_S:
                yield f"{name}: no token for {each.ended_at - last:.0f} s, and then a timeout"
        elif each.error in _INTERNAL:
            yield f"{name}: failed with {each.error}"


async def unrest(cluster: VirtualCluster) -> list[str]:
    """Wait until all running nodes are healthy and empty. Return the problems after RECOVERY_S."""
    for _ in range(int(RECOVERY_S)):
        if not await _unrest(cluster):
            return []
        await asyncio.sleep(1.0)
    return await _unrest(cluster)


async def _unrest(cluster: VirtualCluster) -> list[str]:
    reports = await cluster.reports()
    found = []
    for name, node in cluster.nodes.items():
        if node.killed or (node.drained and node.has_ended):
            continue
        if node.drained:
            found.append(f"{name}: it drains and does not end")
        elif node.has_ended:
            found.append(f"{name}: it has ended by itself")
        else:
            found += [f"{name}: {problem}" for problem in _of_report(reports[name])]
            found += [f"{name}: {problem}" for problem in node.problems()]
    return found


def _of_report(report: NodeReport) -> Iterator[str]:
    if report.description is None or report.state != "ready":
        yield f"it is {report.state}, not ready"
        return
    for holder, number in report.description.pages.items():
        if number and holder not in _IDLE_PAGES:
            yield f"{number} pages are held by {holder}"
    for queue, number in report.description.queues.items():
        if number:
            yield f"{number} requests are in the queue {queue}"


_PREFIX = "baton-virtual-"
_NEW = "new-"  # prefix until the directory is locked, or another run would delete it


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make an empty directory, deleted at the end. Also delete directories of killed runs."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        delete_unused(left, shutil.rmtree, os.O_DIRECTORY)
    new = Path(tempfile.mkdtemp(prefix=_NEW + _PREFIX))
    fd = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    directory = new.rename(new.with_name(new.name.removeprefix(_NEW)))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(fd)


NAME = "sim"
# Returns a planner by its flags and the router's address. It runs until it is cancelled.
MakePlanner = Callable[[Sequence[str], str], Callable[[], Coroutine[Any, Any, None]]]


def run(
    scenario: Scenario, clock: VirtualClock, make_planner: MakePlanner | None = None
) -> RunReport:
    """Run a scenario to its end.

    Args:
        clock: installed virtual clock.
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
        raise ValueError(f"load: warm_up and cool_down leave none of {len(arrivals)} requests")
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
    """Start the faults, operations and planner that run beside the load."""
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
    """Send each request at its time. Append their tasks to `sent`."""
    for arrival in arrivals:
        await _until(begin + arrival.at)
        sent.append(asyncio.ensure_future(cluster.answer(arrival)))


async def _fail(cluster: VirtualCluster, fault: Fault, begin: float) -> None:
    await _until(begin + fault.at)
    await fault.strike(cluster)


async def _operate(cluster: VirtualCluster, operation: TimedCommand, begin: float) -> None:
    await _until(begin + operation.at)
    await carry_out(operation, cluster)


async def _until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
