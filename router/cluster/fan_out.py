"""Calls to nodes, one or many in parallel, with a result or a reason for each."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Protocol

import grpc.aio

from common import rpc
from common.errors import cut

LEFT = "it has left"


class NodeMember(Protocol):
    """A node of the cluster."""

    @property
    def role(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def stub(self) -> Any:
        """Stub of its Node service."""
        ...


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

    async def one(member: NodeMember) -> BroadcastResult:
        answer, problem = await ask(member, method, request, longest_s)
        where = f"{member.role} node {member.address}"
        return BroadcastResult(member, answer, problem and f"{where}: {problem}")

    return list(await asyncio.gather(*map(one, members)))


async def ask(
    member: NodeMember,
    method: str,
    request: Any,
    longest_s: float,
    max_bytes: int | None = None,
) -> tuple[Any, str]:
    """Call a method of one node. Returns its response and "", or None and the reason.

    Args:
        max_bytes: longest accepted response.
    """
    try:
        answer = await methodcaller(method, request, timeout=longest_s)(member.stub)
    except grpc.aio.AioRpcError as error:
        return None, cut(error.details() or error.code().name)
    except asyncio.CancelledError:
        rpc.raise_if_cancelled()
        return None, LEFT  # only this call was cancelled
    if answer is None:  # grpcio returns None for bytes that it cannot parse
        return None, "invalid message"
    if max_bytes is not None and answer.ByteSize() > max_bytes:
        return None, f"its response has {answer.ByteSize()} bytes, at most {max_bytes} allowed"
    return answer, ""
