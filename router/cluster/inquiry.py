"""Collects what all nodes know about one request, without the router's own part."""

import asyncio
import time
from dataclasses import dataclass

import grpc.aio

from common import rpc
from common.errors import cut
from common.requests.request_trace import RequestTraces, from_proto
from protos import node_pb2
from router.cluster.survey import ClusterState, NodeMember

_DEADLINE_S = 2.0
_MAX_BYTES = 1 << 20  # of a response


@dataclass(frozen=True, slots=True)
class DescribeResult:
    """Response of one node.

    Attributes:
        at: time.monotonic() when it arrived. It was made at most one call earlier, because an
            engine responds after its current step.
        problem: why there is no response, or empty.
    """

    role: str
    address: str
    at: float
    flights: RequestTraces
    problem: str = ""


class NodeDescriber:
    """Queries about requests. For one event loop."""

    def __init__(self, survey: ClusterState) -> None:
        self._survey = survey

    async def ask(self, request_id: str) -> list[DescribeResult]:
        """Return the responses of all nodes, prefill nodes first, within 2 s. Raises nothing."""
        members = sorted(self._survey.members, key=lambda member: member.role != "prefill")
        return list(await asyncio.gather(*(_ask(member, request_id) for member in members)))


async def _ask(member: NodeMember, request_id: str) -> DescribeResult:
    try:
        request = node_pb2.ExplainHereRequest(request_id=request_id)
        answer = await member.stub.Explain(request, timeout=_DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return _nothing(member, cut(error.details() or error.code().name))
    except asyncio.CancelledError:
        rpc.raise_if_cancelled()
        return _nothing(member, "it has left")  # only this call was cancelled
    if answer is None:  # grpcio returns None for bytes that it cannot parse
        return _nothing(member, "invalid message")
    if answer.ByteSize() > _MAX_BYTES:
        return _nothing(member, f"it says {answer.ByteSize()} bytes of one request")
    return DescribeResult(member.role, member.address, time.monotonic(), from_proto(answer))


def _nothing(member: NodeMember, problem: str) -> DescribeResult:
    return DescribeResult(
        member.role, member.address, time.monotonic(), RequestTraces((), 0), problem
    )
