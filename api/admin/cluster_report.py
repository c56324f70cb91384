"""The response of GetCluster and GET /cluster.

It has this router, each node's description of itself and the planner's view of the nodes. The
protobuf message is the single definition. The JSON is derived from it, field by field.
"""

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from api.admin.plans import Plans
from api.admin.router_state import MergedState
from api.http.answers import whole
from api.http.request import HttpRequest
from protos import router_pb2
from router.cluster.cluster_state import ClusterState, NodeReport

REUSE_S = 0.25


class ClusterReport:
    """Builder of the cluster report. For one event loop."""

    def __init__(self, state: ClusterState, router: MergedState, plans: Plans) -> None:
        self._state = state
        self._router = router
        self._plans = plans

    async def make(self) -> router_pb2.GetClusterResponse:
        """Query all nodes and the other processes of this router, within 2 s."""
        reports, router, plan = await asyncio.gather(
            self._state.look(), self._router.now(), self._plans.now()
        )
        began = self._router.began
        return router_pb2.GetClusterResponse(
            nodes=[_node(report, report.at - began) for report in reports],
            router=router,
            plan=plan,
        )


class ClusterEndpoint:
    """HTTP handler for GET /cluster.

    A response may be up to `REUSE_S` seconds old, so more viewers do not cause more node queries.
    """

    def __init__(self, report: ClusterReport) -> None:
        self._report = report
        self._making: asyncio.Task[bytes] | None = None
        self._made_at = 0.0

    async def __call__(self, request: HttpRequest) -> web.Response:
        making = self._making
        if making is None or (making.done() and time.monotonic() > self._made_at + REUSE_S):
            making = self._making = asyncio.create_task(self._make())
        # A viewer that disconnects must not cancel the query that other viewers share.
        body = await asyncio.shield(making)
        return whole(200, body, headers=(("cache-control", "no-store"),))

    async def _make(self) -> bytes:
        body = msgspec.json.encode(plain(await self._report.make()))
        self._made_at = time.monotonic()
        return body


def plain(message: Message) -> dict[str, Any]:
    """Return every field under its own name, unset ones too.

    Counts are JSON numbers, where protobuf's own JSON uses strings. A fixed64 field is an identity
    and stays a string, because JavaScript would round the number. Bytes are hexadecimal.
    """
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            if field.is_repeated:
                value = list(value)
            elif field.type == FieldDescriptor.TYPE_FIXED64:
                value = str(value)
            elif field.type == FieldDescriptor.TYPE_BYTES:
                value = value.hex()
        elif field.message_type.GetOptions().map_entry:
            value = dict(value)
        elif field.is_repeated:
            value = [plain(each) for each in value]
        else:
            value = plain(value)
        fields[field.name] = value
    return fields


def _node(report: NodeReport, seen_s: float) -> router_pb2.ClusterNode:
    node = router_pb2.ClusterNode(
        role=report.role, address=report.address, state=report.state, seen_s=seen_s
    )
    if report.description is None:
        return node
    described = report.description
    node.instance_id = described.instance_id
    node.pids.extend(described.pids)
    node.pages.update(described.pages)
    node.links.extend(described.links)
    node.queues.update(described.queues)
    node.counters.update(described.counters)
    node.steps = described.steps
    node.model = described.model
    node.mode = described.mode
    node.context_length = described.context_length
    node.weights = described.weights
    node.prompts.CopyFrom(described.prompts)
    return node
