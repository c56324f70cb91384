"""`baton requests show`: the history of a request on the router and on all nodes."""

import argparse
from collections.abc import Iterator

from cli import client
from cli.operating.command import Result, safe
from cli.operating.fleet import Fleet
from common.settings import ConfigArgumentParser
from protos.router_pb2 import ExplainRequest, ExplainResponse

DETAILS = (
    "The events are in the order of time. The router and each node keep the last requests that "
    "ended, and failed ones for longer."
)
UNDONE = "no process knows the request, or no router responds"
_ANSWER_S = 10.0  # the router allows its nodes 2 s


def add_flags(parser: ConfigArgumentParser) -> None:
    parser.add_argument(
        "request",
        metavar="REQUEST",
        help="request id, or X-Request-Id of the client: then the newest request with that label",
    )
    client.add_router_flag(parser)


async def show(options: argparse.Namespace, fleet: Fleet) -> Result:
    request = ExplainRequest(name=options.request)
    history = await fleet.tell_router(options.router, "Explain", request, _ANSWER_S)
    return Result(text(history), history)


def text(history: ExplainResponse) -> str:
    """Return the events as text. `took` is the time since the same process's previous event."""
    return "\n".join((*_head(history), "", *_events(history), *_silent(history)))


def _head(history: ExplainResponse) -> Iterator[str]:
    label = f"  called {safe(history.label)}" if history.label else ""
    yield f"request {safe(history.request_id)}{label}"
    if not history.outcome:
        yield "  unknown to the router. Times count from the arrival at the first node"
        return
    yield (
        f"  {safe(history.outcome)} after {history.seconds:.3f} s: "
        f"{history.prompt_tokens} prompt tokens ({history.cached_tokens} cached), "
        f"{history.completion_tokens} generated"
    )
    if history.error:
        yield f"  {safe(history.error)}"


def _events(history: ExplainResponse) -> Iterator[str]:
    places = [f"{each.where} {each.node}".strip() for each in history.events]
    width = max(map(len, places), default=0)
    yield f"{'at':>10} {'took':>9}  {'where':<{width}}  what"
    before: dict[str, float] = {}
    for place, each in zip(places, history.events, strict=True):
        took = f"{each.at_s - before[place]:9.3f}" if place in before else " " * 9
        before[place] = each.at_s
        what = f"{each.event.what}: {each.event.detail}" if each.event.detail else each.event.what
        yield f"{each.at_s:10.3f} {took}  {safe(place):<{width}}  {safe(what)}"


def _silent(history: ExplainResponse) -> Iterator[str]:
    """Name the nodes that may have taken part but did not respond."""
    for node in history.nodes:
        if node.problem:
            yield f"{safe(node.role)} {safe(node.address)} does not respond: {safe(node.problem)}"
