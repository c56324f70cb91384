"""Asks every node what it knows of one request. Knows nothing of what the router itself knows."""

import asyncio
import time
from dataclasses import dataclass

import grpc.aio

from common import rpc
from common.errors import cut
from common.requests.request_trace import Flights, from_proto
from protos import node_pb2
from router.cluster.survey import Member, Survey

_DEADLINE_S = 2.0
_MAX_BYTES = 1 << 20  # of an answer


@dataclass(frozen=True, slots=True)
class Said:
    """By one node.

    Attributes:
        at: time.monotonic() of the answer. It was made before, but no longer than its way took: an
            engine that is in a step answers after it.
        problem: why it has said nothing; empty if it has.
    """

    role: str
    address: str
    at: float
    flights: Flights
    problem: str = ""


class Inquiry:
    """For one event loop."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    async def ask(self, request_id: str) -> list[Said]:
        """Every node's answer, prefill nodes first, within 2 s. Raises nothing."""
        members = sorted(self._survey.members, key=lambda member: member.role != "prefill")
        return list(await asyncio.gather(*(_ask(member, request_id) for member in members)))


async def _ask(member: Member, request_id: str) -> Said:
    try:
        request = node_pb2.ExplainHereRequest(request_id=request_id)
        answer = await member.stub.Explain(request, timeout=_DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return _nothing(member, cut(error.details() or error.code().name))
    except asyncio.CancelledError:
        rpc.raise_if_cancelled()
        return _nothing(member, "it has left")  # the call alone is cancelled
    if answer is None:  # what grpcio makes of bytes that it cannot parse
        return _nothing(member, "it has sent bytes that are no message")
    if answer.ByteSize() > _MAX_BYTES:
        return _nothing(member, f"it says {answer.ByteSize()} bytes of one request")
    return Said(member.role, member.address, time.monotonic(), from_proto(answer))


def _nothing(member: Member, problem: str) -> Said:
    return Said(member.role, member.address, time.monotonic(), Flights((), 0), problem)
