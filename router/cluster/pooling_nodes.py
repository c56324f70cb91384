"""Placement of pooling calls (embeddings, scores) on prefill nodes, and the call itself.

Each node has a separate connection for pooling, opened by the first call, so that large prompts do
not delay Describe calls.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import msgspec

from common import rpc
from common.errors import (
    REQUEST_ERRORS,
    EngineDied,
    NodeUnavailable,
    Overloaded,
    QueueFull,
    RequestFailed,
    ServingError,
    cut,
)
from protos import pooling_pb2, pooling_pb2_grpc
from router.cluster.cluster import of_model
from router.cluster.sources import Role
from router.policy.load import (
    DecodeChoice,
    LoadReservation,
    NodeBacklogs,
    NodeLoad,
    PlacementKey,
    PrefillChoice,
    RequestDue,
)
from router.policy.policies import RoutingPolicy

NO_PREFILL_NODE = "no prefill node is ready to compute embeddings or scores"
_MAX_CALLS = 32  # concurrent calls to one node from this router; a node accepts 64 per connection
_MAX_RETRY_S = 3600.0
_LATE_S = 1.0  # seconds added to the budget, because the node's own error is more specific
_NO_NODE = ""  # in place of a decode node


class PoolingNode:
    """Connection to one prefill node for pooling calls. For one event loop."""

    def __init__(
        self,
        address: str,
        make_channel: Callable[[str], grpc.aio.Channel],
        resources: AsyncExitStack,
    ) -> None:
        """
        Args:
            resources: gets the connection. The caller closes it when the node has left.
        """
        self.address = address
        self._make_channel = make_channel
        self._resources = resources
        self._stub: Any = None
        self._places = asyncio.Semaphore(_MAX_CALLS)

    async def pool(
        self, request: pooling_pb2.PoolRequest, timeout_s: float
    ) -> pooling_pb2.PoolResponse:
        """Call the node. Cancellation cancels the call.

        Raises:
            ServingError: the node's error, or a wrong number of vectors.
        """
        async with self._places:
            try:
                answer = await self._calls.Pool(request, timeout=timeout_s + _LATE_S)
            except grpc.aio.AioRpcError as error:
                raise _serving_error(error) from None
            except asyncio.CancelledError:
                rpc.raise_if_cancelled()
                raise NodeUnavailable("this prefill node left the cluster") from None
        if answer is None or len(answer.vectors) != len(request.prompts):
            raise RequestFailed("the response of a prefill node lacks embeddings")
        response: pooling_pb2.PoolResponse = answer
        return response

    @property
    def _calls(self) -> Any:
        if self._stub is None:
            channel = self._make_channel(self.address)
            self._resources.push_async_callback(channel.close)
            self._stub = pooling_pb2_grpc.PoolingStub(channel)  # type: ignore[no-untyped-call]
        return self._stub


class PoolingPlacement(msgspec.Struct, frozen=True):
    """The node chosen for a pooling call. The caller of `choose` closes the charge."""

    node: PoolingNode
    charge: LoadReservation


class PoolingNodes:
    """All prefill nodes for pooling calls. Nodes may join and leave. For one event loop."""

    def __init__(
        self,
        make_channel: Callable[[str], grpc.aio.Channel],
        fit: Callable[[str, Role], bool],
        paused: Callable[[str], bool],
        policy: RoutingPolicy,
        load: NodeLoad,
        backlogs: NodeBacklogs,
        served: str = "",
    ) -> None:
        """
        Args:
            fit: returns whether the node at an address has a role and may get requests now.
            paused: returns whether requests would wait at an address.
            served: see Cluster.
        """
        self._make_channel = make_channel
        self._fit: Callable[[str], bool] = lambda address: fit(address, "prefill")
        self._paused = paused
        self._policy = policy
        self._load = load
        self._backlogs = backlogs
        self._served = served
        self._nodes: dict[str, PoolingNode] = {}

    @asynccontextmanager
    async def member(self, address: str) -> AsyncIterator[None]:
        """Offer the prefill node for pooling calls while inside the context."""
        async with AsyncExitStack() as resources:
            node = self._nodes[address] = PoolingNode(address, self._make_channel, resources)
            try:
                yield
            finally:
                if self._nodes.get(address) is node:
                    del self._nodes[address]

    @property
    def ready(self) -> bool:
        return any(map(self._fit, self._nodes))

    def others(self, tried: Collection[str]) -> bool:
        """Return whether there is a usable node that is not in `tried`."""
        return any(address not in tried and self._fit(address) for address in self._nodes)

    def choose(
        self, key: PlacementKey, due: RequestDue, avoid: Collection[str] = ()
    ) -> PoolingPlacement:
        """Choose a node for a prompt by the routing policy.

        Args:
            avoid: nodes that were tried.
        Raises:
            NodeUnavailable: there is no other node.
            QueueFull: no node can start in time.
        """
        nodes = [each for each in self._nodes if each not in avoid and self._fit(each)]
        if not nodes:
            raise NodeUnavailable(of_model(NO_PREFILL_NODE, self._served))
        awake = [each for each in nodes if not self._paused(each)]
        anywhere = DecodeChoice(_NO_NODE, tuple(map(PrefillChoice, awake or nodes)))
        choices = self._backlogs.in_time([anywhere], len(key.token_ids), due)
        placement = self._policy.pick(key, choices)
        address = placement.prefill[0]
        start_by = self._backlogs.start_by(address, len(key.token_ids), due)
        charge = self._load.charge(placement, len(key.token_ids), start_by)
        return PoolingPlacement(self._nodes[address], charge)


def _serving_error(error: grpc.aio.AioRpcError) -> ServingError:
    sentence = cut(error.details() or error.code().name)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return NodeUnavailable("this version of a prefill node does not support embeddings")
    if error.code() is EngineDied.status:
        return EngineDied(sentence)
    if error.code() is not Overloaded.status:
        return REQUEST_ERRORS.get(error.code().value[0], RequestFailed)(sentence)
    for name, value in error.trailing_metadata() or ():
        if name == "retry-after" and str(value).isdecimal():
            return QueueFull(sentence, min(float(value), _MAX_RETRY_S))
    return Overloaded(sentence)
