"""Operators' commands that show a router's state: `baton status`, and lists of nodes, requests,
models, adapters and weights."""

import argparse
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from cli import client
from cli.operating.command import EXIT_UNDONE, Operation, Result, safe, size, table
from cli.operating.fleet import Fleet, add_url_flag
from protos.router_pb2 import (
    ClusterNode,
    ExplainRequest,
    ExplainResponse,
    GetClusterResponse,
    RouterState,
)

_NOT_READY = "the router does not respond or is not ready, or a node is not ready"


async def _status(options: argparse.Namespace, fleet: Fleet) -> Result:
    cluster = await fleet.look(options.router)
    nodes = cluster.nodes
    healthy = cluster.router.state == "ready" and all(node.state == "ready" for node in nodes)
    return Result(
        "\n".join(_status_lines(options.router, cluster)), cluster, 0 if healthy else EXIT_UNDONE
    )


def _status_lines(address: str, cluster: GetClusterResponse) -> Iterator[str]:
    router = cluster.router
    reason = f": {router.reason}" if router.reason else ""
    yield f"router    {address} {router.state}{reason}, version {router.version}"
    for model in router.models:
        state = "" if len(router.models) == 1 else f", {model.state}"
        why = f": {model.reason}" if state and model.reason else ""
        yield f"model     {model.name}, context length {model.context_length}{state}{why}"
    processes = f"{router.processes}"
    if router.silent_processes:
        processes += f", {router.silent_processes} do not respond"
    yield f"processes {processes}"
    yield f"requests  {router.live_requests} of at most {router.max_requests}"
    roles = [node.role for node in cluster.nodes]
    for role in dict.fromkeys(("prefill", "decode", *roles)):
        states = Counter(node.state for node in cluster.nodes if node.role == role)
        counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        yield f"{role:<9} {counted or 'no nodes'}"
    if split := [node for node in cluster.nodes if node.ranks]:
        ranks = [rank for node in split for rank in node.ranks]
        memory, behind = sum(r.memory_bytes for r in ranks), max(r.steps_behind for r in ranks)
        yield (
            f"ranks     {len(ranks)} on {len(split)} of {len(cluster.nodes)} nodes, "
            f"{size(memory)} of memory, at most {behind} steps behind"
        )
    if unready := [node for node in cluster.nodes if node.state != "ready"]:
        yield ""
        yield _node_table(unready, router)


def _node_table(nodes: Iterable[ClusterNode], router: RouterState) -> str:
    """Return a table of nodes. It has a column for the model if the router has several."""
    if len(router.models) < 2:
        return table(_NODE_HEADER, map(_node_row, nodes))
    rows = ((node.served_model, *_node_row(node)) for node in nodes)
    return table(("MODEL", *_NODE_HEADER), rows)


_NODE_HEADER = ("ROLE", "ADDRESS", "STATE", "REQUESTS", "PAGES USED", "STEPS")


def _node_row(node: ClusterNode) -> tuple[str, ...]:
    pages = sum(node.pages.values())
    used = pages - node.pages.get("free", 0) - node.pages.get("cache", 0)
    return (
        node.role,
        node.address,
        node.state,
        str(sum(node.queues.values())),
        f"{used} of {pages}" if pages else "-",
        str(node.steps),
    )


async def _nodes(options: argparse.Namespace, fleet: Fleet) -> Result:
    cluster = await fleet.look(options.router)
    nodes = cluster.nodes
    tables = [_node_table(nodes, cluster.router)]
    if ranks := [row for node in nodes for row in _rank_rows(node)]:
        tables.append(table(_RANK_HEADER, ranks))
    if grouped := [node for node in nodes if node.group]:
        rows = sorted((node.role, node.group, node.group_rank, node.address) for node in grouped)
        tables.append(table(_GROUP_HEADER, [[str(value) for value in row] for row in rows]))
    return Result("\n\n".join(tables), GetClusterResponse(nodes=nodes))


_GROUP_HEADER = ("ROLE", "GROUP", "RANK", "NODE")
_RANK_HEADER = ("NODE WITH RANKS", "RANK", "PID", "DEVICE", "MEMORY", "STEPS BEHIND")


def _rank_rows(node: ClusterNode) -> Iterator[tuple[str, ...]]:
    for each in node.ranks:
        yield (
            node.address,
            str(each.rank),
            str(each.pid),
            each.device,
            size(each.memory_bytes) if each.memory_bytes else "-",
            str(each.steps_behind),
        )


async def _weights(options: argparse.Namespace, fleet: Fleet) -> Result:
    nodes = (await fleet.look(options.router)).nodes
    listed = [
        {"role": node.role, "address": node.address, "weights": node.weights.hex()}
        for node in nodes
    ]
    rows = ((each["role"], each["address"], each["weights"] or "of its start") for each in listed)
    return Result(table(("ROLE", "ADDRESS", "WEIGHTS"), rows), {"nodes": listed})


async def _requests(options: argparse.Namespace, fleet: Fleet) -> Result:
    content = await fleet.get(options.url, "/requests")
    header = ("ID", "LABEL", "OUTCOME", "AGE", "SECONDS", "PROMPT", "OUTPUT", "DECODE NODE")
    return Result(table(header, map(_request_row, content["requests"])), content)


def _request_row(request: dict[str, Any]) -> tuple[str, ...]:
    return (
        request["id"],
        request["label"] or "-",
        request["outcome"],
        f"{max(0.0, time.time() - request['arrived']):.0f} s",
        f"{request['seconds']:.3f}",
        f"{request['prompt_tokens']}",
        f"{request['completion_tokens']}",
        request["decode"] or "-",
    )


async def _models(options: argparse.Namespace, fleet: Fleet) -> Result:
    return _listed((await fleet.get(options.url, "/v1/models"))["data"])


async def _adapters(options: argparse.Namespace, fleet: Fleet) -> Result:
    models = (await fleet.get(options.url, "/v1/models"))["data"]
    return _listed([model for model in models if model["parent"]])


def _listed(models: list[dict[str, Any]]) -> Result:
    rows = ((each["id"], each["parent"] or "-", str(each["max_model_len"])) for each in models)
    return Result(table(("NAME", "BASE MODEL", "CONTEXT LENGTH"), rows), models)


def _view(
    work: Callable[[argparse.Namespace, Fleet], Awaitable[Result]],
    details: str = "",
    *,
    http: bool = False,
    undone: str = "the router does not respond",
) -> Operation:
    return Operation(
        details=details,
        undone=undone,
        flags=(add_url_flag if http else client.add_router_flag,),
        work=work,
    )


_SHOW_DETAILS = (
    "The events are in the order of time. The router and each node keep the last requests that "
    "ended, and failed ones for longer."
)
_SHOW_UNDONE = "no process knows the request, or no router responds"
_ANSWER_S = 10.0  # the router allows its nodes 2 s


_shown_request = client.flag(
    "request",
    metavar="REQUEST",
    help="request id, or X-Request-Id of the client: then the newest request with that label",
)


async def _show(options: argparse.Namespace, fleet: Fleet) -> Result:
    request = ExplainRequest(name=options.request)
    history = await fleet.call_router(options.router, "Explain", request, _ANSWER_S)
    return Result(text(history), history)


def text(history: ExplainResponse) -> str:
    """Return the events as text. `took` is the time since the process's previous event."""
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
    """Name the nodes that may have taken part in the request but did not respond."""
    for node in history.nodes:
        if node.problem:
            yield f"{safe(node.role)} {safe(node.address)} does not respond: {safe(node.problem)}"


VIEWS = {
    "status": _view(
        _status, "Nodes that are not ready are listed with their states.", undone=_NOT_READY
    ),
    "nodes list": _view(_nodes),
    "requests list": _view(
        _requests, "Running requests come first, then the newest that ended.", http=True
    ),
    "models list": _view(_models, http=True),
    "adapters list": _view(_adapters, http=True),
    "weights list": _view(_weights),
    "requests show": Operation(
        details=_SHOW_DETAILS,
        undone=_SHOW_UNDONE,
        flags=(_shown_request, client.add_router_flag),
        work=_show,
    ),
}
