"""Operators' commands that are one call of a node or router, which may forward it to all nodes.

They differ only by their entries in CALLS.
"""

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from cli import client
from cli.operating import command
from cli.operating.command import Operation, Result
from cli.operating.fleet import Fleet
from common.pausing import MEMORY_TAGS
from common.settings import ConfigArgumentParser
from protos import router_pb2 as pb

MODES = {
    "abort": "they end with an error",
    "retract": "they are recomputed from their tokens afterwards",
    "in_place": "they keep their KV",
}
_MEMORY_S = 1500.0  # seconds to copy or read all weights
_PROFILE_S = 90.0


def _call(
    method: str,
    longest_s: float,
    request: Callable[[Namespace], Any],
    text: Callable[[Any], str],
    *flags: client.AddFlags,
    undone: str,
    details: str = "",
) -> Operation:
    """Describe a command that is one call.

    Args:
        method: method of the router, and of a node if the command may name one.
        longest_s: timeout in seconds, for all nodes of one role and then for the other role.
        text: makes the output from the response.
    """

    async def work(options: Namespace, fleet: Fleet) -> Result:
        response = await command.call(options, fleet, method, request(options), longest_s)
        return Result(text(response), response)

    return Operation(details=details, undone=undone, flags=flags, work=work)


_mode = client.flag(
    "--mode",
    choices=tuple(MODES),
    default="abort",
    help="effect on running requests. "
    + ". ".join(f"{mode}: {effect}" for mode, effect in MODES.items())
    + " (%(default)s)",
)
_tags = client.flag(
    "--only",
    dest="tags",
    action="append",
    choices=MEMORY_TAGS,
    help="part of the memory (all parts)",
)
_request = client.flag("request", metavar="REQUEST", help="request id of the router")
_target = client.flag(
    "target",
    nargs="?",
    type=client.address,
    metavar="TARGET",
    help="HOST:PORT of a decode node (the routing policy chooses)",
)
_adapter = client.flag("name", metavar="NAME", help="name of the adapter in requests")
_adapter_path = client.flag(
    "path", metavar="PATH", help="directory of the adapter, below engine.lora.adapter_dir"
)
_seconds = client.flag(
    "--seconds",
    type=client.positive,
    default=5.0,
    metavar="S",
    help="seconds after which the profile ends (%(default)g)",
)
_steps = client.flag(
    "--steps",
    type=int,
    choices=range(1, 1001),
    default=20,
    metavar="N",
    help="steps of each node to record, 1 to 1000 (%(default)s)",
)


def _weights(parser: ConfigArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default="",
        help="directory below engine.weights_dir of every node",
    )
    source.add_argument(
        "--from",
        dest="node",
        metavar="NODE",
        default="",
        help="address of a node, as the router knows it, whose weights the others copy",
    )
    parser.add_argument(
        "--abort",
        action="store_true",
        help="abort running requests (they are recomputed from their tokens)",
    )


def _aborted(count: int) -> str:
    return f", {count} requests aborted" if count else ""


def _paused(answer: pb.PauseResponse) -> str:
    return ("paused" if answer.fresh else "already paused") + _aborted(answer.aborted)


def _resumed(answer: pb.ContinueResponse) -> str:
    return "resumed" if answer.was_paused else "no node was paused"


def _updated(answer: pb.UpdateWeightsResponse) -> str:
    return f"all nodes use weights {answer.id.hex()}{_aborted(answer.aborted)}"


def _migrated(answer: pb.MoveResponse) -> str:
    return f"{answer.request_id} migrated from {answer.source} to {answer.target}"


def _loaded(answer: pb.LoadAdapterResponse) -> str:
    return f"{'loaded' if answer.fresh else 'already loaded'}, content {answer.id.hex()}"


def _unloaded(answer: pb.UnloadAdapterResponse) -> str:
    return "unloaded" if answer.known else "no node had it loaded"


async def _profile(options: Namespace, fleet: Fleet) -> Result:
    begin = pb.StartProfileRequest(num_steps=options.steps, model=options.model)
    await command.call(options, fleet, "StartProfile", begin, _PROFILE_S)
    await asyncio.sleep(options.seconds)
    end = pb.StopProfileRequest(model=options.model)
    written = await command.call(options, fleet, "StopProfile", end, _PROFILE_S)
    return Result(_traces(written), written)


def _traces(written: Any) -> str:
    if not isinstance(written, pb.ProfilesResponse):  # otherwise: a single node's response
        return str(written.path)
    return "\n".join(f"{each.role} {each.address}: {each.path}" for each in written.profiles)


CALLS = {
    "nodes pause": _call(
        "Pause",
        150.0,
        lambda options: pb.PauseRequest(mode=options.mode, model=options.model),
        _paused,
        *(_mode, command.add_one_or_all),
        details="New requests are queued until `baton nodes resume`. Their deadlines apply.",
        undone="not all nodes are paused. Then no node is paused",
    ),
    "nodes resume": _call(
        "Continue",
        30.0,
        lambda options: pb.ContinueRequest(model=options.model),
        _resumed,
        command.add_one_or_all,
        undone="a node does not respond",
    ),
    "nodes sleep": _call(
        "ReleaseMemory",
        _MEMORY_S,
        lambda options: pb.ReleaseMemoryRequest(tags=options.tags, model=options.model),
        lambda _: "memory released",
        *(_tags, command.add_one_or_all),
        details="The memory of KV pages and weights is released until `baton nodes wake`. The "
        "nodes must be idle or paused, and stay paused meanwhile.",
        undone="not all nodes released their memory. Then no node has",
    ),
    "nodes wake": _call(
        "ResumeMemory",
        _MEMORY_S,
        lambda options: pb.ResumeMemoryRequest(tags=options.tags, model=options.model),
        lambda _: "memory allocated",
        *(_tags, command.add_one_or_all),
        details="Nodes that an operator paused need `baton nodes resume` afterwards.",
        undone="a node could not allocate all of its memory",
    ),
    "nodes update-weights": _call(
        "UpdateWeights",
        _MEMORY_S,
        lambda options: pb.UpdateWeightsRequest(
            path=options.path, from_node=options.node, abort=options.abort, model=options.model
        ),
        _updated,
        *(_weights, command.add_router_and_model),
        details="The nodes read and check the files while they serve. They are paused only while "
        "the weights are overwritten.",
        undone="not all nodes use the new weights. The error names them",
    ),
    "nodes profile": Operation(
        details="Each node writes a trace below its engine.profile_dir. The command prints "
        "the paths.",
        undone="a node was not profiled",
        flags=(_seconds, _steps, command.add_one_or_all),
        work=_profile,
    ),
    "requests migrate": _call(
        "Move",
        60.0,
        lambda options: pb.MoveRequest(request_id=options.request, target=options.target or ""),
        _migrated,
        *(_request, _target, client.add_router_flag),
        details="Its client sees a pause of a few steps, and nothing is recomputed. "
        "`baton requests list` prints the ids.",
        undone="the request is not migrated. It continues where it is",
    ),
    "adapters load": _call(
        "LoadAdapter",
        _MEMORY_S,
        lambda options: pb.LoadAdapterRequest(
            name=options.name, path=options.path, model=options.model
        ),
        _loaded,
        *(_adapter, _adapter_path, command.add_router_and_model),
        undone="a node rejects the adapter. Then no node has loaded it",
    ),
    "adapters unload": _call(
        "UnloadAdapter",
        30.0,
        lambda options: pb.UnloadAdapterRequest(name=options.name, model=options.model),
        _unloaded,
        *(_adapter, command.add_router_and_model),
        details="Running requests that use it continue.",
        undone="the adapter is not loaded",
    ),
}
