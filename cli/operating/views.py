"""Commands that list what a router knows: `baton status` and the lists of nodes, requests, models,
adapters and weights."""

import argparse
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from cli import client
from cli.operating import history
from cli.operating.command import EXIT_UNDONE, Operation, Result, table
from cli.operating.fleet import Fleet
from cli.operating.http_api import add_url_flag
from protos.router_pb2 import ClusterNode, GetClusterResponse

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
    yield f"model     {router.model}, context length {router.context_length}"
    processes = f"{router.processes}"
    if router.silent_processes:
        processes += f", {router.silent_processes} do not respond"
    yield f"processes {processes}"
    yield f"requests  {router.live_requests} of at most {router.max_requests}"
    for role in ("prefill", "decode"):
        states = Counter(node.state for node in cluster.nodes if node.role == role)
        counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        yield f"{role:<9} {counted or 'no nodes'}"
    if unready := [node for node in cluster.nodes if node.state != "ready"]:
        yield ""
        yield table(_NODE_HEADER, map(_node_row, unready))


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
    nodes = (await fleet.look(options.router)).nodes
    return Result(table(_NODE_HEADER, map(_node_row, nodes)), GetClusterResponse(nodes=nodes))


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
        add_flags=add_url_flag if http else client.add_router_flag,
        work=work,
    )


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
        details=history.DETAILS,
        undone=history.UNDONE,
        add_flags=history.add_flags,
        work=history.show,
    ),
}
