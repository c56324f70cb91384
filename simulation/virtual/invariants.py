"""The rules that every run must keep, whatever its faults."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

from common.page_tables import PageTables
from router.cluster.cluster_state import NodeReport
from simulation.device.witness import expected_tokens
from simulation.virtual.cluster import Response, VirtualCluster

RECOVERY_S = 60.0  # from the end of the last request and of all faults, until all is at rest
_IDLE_PAGES = ("free", "cache")  # holders of pages of a node without requests
# Errors that mean a defect and not a failure of a node: see common/errors.py.
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
    """Yield each response that is wrong, hangs, or failed with an internal error.

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
    """Wait until all living nodes are healthy and empty. Return what is not after RECOVERY_S."""
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
