"""Calls to many nodes in parallel, with one result for each."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import grpc.aio

from common import rpc
from common.errors import cut
from router.cluster.survey import NodeMember


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """Result of one node. `problem` names the node and its error, or is "" after success."""

    member: NodeMember
    answer: Any = None
    problem: str = ""


async def ask_all(
    members: Sequence[NodeMember], method: str, request: Any, longest_s: float
) -> list[BroadcastResult]:
    """Call a method of all members. Returns the results in the order of the members.

    Args:
        method: of the Node service.
        longest_s: time limit of each call, in seconds.
    """
    return list(await asyncio.gather(*(_ask(each, method, request, longest_s) for each in members)))


async def _ask(member: NodeMember, method: str, request: Any, longest_s: float) -> BroadcastResult:
    where = f"{member.role} node {member.address}"
    try:
        answer = await methodcaller(method, request, timeout=longest_s)(member.stub)
    except grpc.aio.AioRpcError as error:
        return BroadcastResult(
            member, problem=f"{where}: {cut(error.details() or error.code().name)}"
        )
    except asyncio.CancelledError:
        rpc.raise_if_cancelled()
        return BroadcastResult(
            member, problem=f"{where}: it has left"
        )  # only this call was cancelled
    if answer is None:  # grpcio returns None for bytes that it cannot parse
        return BroadcastResult(member, problem=f"{where}: it has sent bytes that are no message")
    return BroadcastResult(member, answer)
