"""Cluster membership: nodes join and leave while the router runs.

A joining node gets a connection and is polled, and CacheWatch subscribes to its cache events.
Decode nodes are sent the addresses of new prefill nodes immediately. A leaving node gets no new
requests and finishes its running ones. Then its connection is closed and decode nodes end their
pairs with it. A node that reports another role leaves with the old role and joins with the new one.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from common.logs import kv
from protos import decode_pb2
from router.cluster.cluster import Cluster
from router.cluster.cluster_state import ClusterState
from router.cluster.decode_client import DecodeClient, LivenessLimits, MigrationOutcome
from router.cluster.pooling_nodes import PoolingNodes
from router.cluster.sources import MAX_ADDRESSES, DiscoveredNodes, Discovery, Role
from router.policy.prefix_index import CacheWatch

log = logging.getLogger(__name__)

# Seconds after which a leaving prefill node has handed off its prompts. Later ones are recomputed
# elsewhere.
HANDOFFS_S = 30.0
MOST_AT_ONCE = 4  # concurrent migrations from one node, to limit the effect on its other requests
_LOOK_S = 0.1
# Seconds between attempts. Requests need a first token to migrate, and failed migrations are
# retried.
_AGAIN_S = 0.05


class Membership:
    """Connections to all nodes that discovery finds. For one event loop."""

    def __init__(
        self,
        discovery: Discovery,
        state: ClusterState,
        cluster: Cluster,
        make_channel: Callable[[str], grpc.aio.Channel],
        cache_watch: CacheWatch | None,  # None if the routing policy does not use cache events
        pooling: PoolingNodes,  # gets prefill nodes as they join and leave
        *,
        budget_s: float,  # longest time in seconds that a request may still need a leaving node
        patience: LivenessLimits | None = None,  # liveness limits of decode nodes' engines
    ) -> None:
        state.on_role = self.has_role
        self._discovery = discovery
        self._state = state
        self._cluster = cluster
        self._make_channel = make_channel
        self._cache_watch = cache_watch
        self._pooling = pooling
        self._budget_s = budget_s
        self._patience = patience
        self._left: dict[tuple[Role, str], asyncio.Event] = {}  # set to make the member leave
        self._roles: dict[str, Role] = {}  # reported roles that differ from the configured ones
        self._prefill: list[str] = []  # including leaving nodes
        self._clients: list[DecodeClient] = []  # including leaving nodes
        self._shapes: dict[DecodeClient, tuple[str, ...]] = {}  # `_shape` of their last Status
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Keep all connections and poll all nodes until cancelled. Then requests in flight fail."""
        async with self._tasks:
            try:
                self._tasks.create_task(self._state.run())
                self._update(self._discovery.members)
                await self._discovery.run(self._update)
                await asyncio.Event().wait()
            finally:
                # First, so that no request is placed again when the streams end.
                self._cluster.close()

    def has_role(self, address: str, role: Role) -> None:
        """Handle a node that reports another role than it joined with."""
        log.info("node changed role %s", kv(role=role, node=address))
        self._roles[address] = role
        self._update(self._discovery.members)

    def _update(self, members: DiscoveredNodes) -> None:
        expected: dict[str, Role] = dict.fromkeys(members.prefill, "prefill")
        expected |= dict.fromkeys(members.decode, "decode")
        expected |= dict.fromkeys(members.encode, "encode")
        now = [(self._roles.get(address, role), address) for address, role in expected.items()]
        for gone in self._roles.keys() - expected.keys():
            del self._roles[gone]
        for member in self._left.keys() - set(now):
            log.info("node removed %s", kv(role=member[0], node=member[1]))
            self._left.pop(member).set()
            self._state.leave(member[1])
        for member in now:
            if member not in self._left:
                self._join(*member)
        self._cluster.refresh()

    def _join(self, role: Role, address: str) -> None:
        """Add a node.

        If a node at this address is still leaving, this is a new node and the old one ends
        separately.
        """
        log.info("node added %s", kv(role=role, node=address))
        left = self._left[role, address] = asyncio.Event()
        channel = self._make_channel(address)
        self._state.join(role, address, channel)
        keep = {
            "prefill": self._keep_prefill,
            "decode": self._keep_decode,
            "encode": self._keep_encode,
        }[role]
        self._tasks.create_task(keep(address, channel, left))

    async def _keep_prefill(
        self, address: str, channel: grpc.aio.Channel, left: asyncio.Event
    ) -> None:
        async with channel:
            self._prefill.append(address)
            self._send_peers()
            watching = self._tasks.create_task(self._watch_cache(address, channel))
            async with self._pooling.member(address):
                await left.wait()
            watching.cancel()
            if address not in self._roles:  # otherwise its old role has left already
                await asyncio.sleep(HANDOFFS_S)
            self._prefill.remove(address)
            self._send_peers()

    async def _keep_encode(
        self, address: str, channel: grpc.aio.Channel, left: asyncio.Event
    ) -> None:
        """Keep a connection for descriptions only. Encode nodes are called by prefill nodes."""
        async with channel:
            await left.wait()

    def _watch_cache(self, address: str, channel: grpc.aio.Channel) -> Coroutine[Any, Any, None]:
        watch = self._cache_watch
        return asyncio.sleep(0) if watch is None else watch.run(address, channel)

    async def _keep_decode(
        self, address: str, channel: grpc.aio.Channel, left: asyncio.Event
    ) -> None:
        client = DecodeClient(
            address,
            channel,
            peers=self._peers(),
            others=self._others(),
            on_move=lambda _: self._moved(client, left),
            on_pulse=lambda: self._pulsed(client, left),
            patience=self._patience,
        )
        async with channel, asyncio.TaskGroup() as tasks:
            self._clients.append(client)
            self._send_peers()
            self._cluster.add(client)
            serving = tasks.create_task(client.run())
            moving = tasks.create_task(evacuate(client))
            watching = tasks.create_task(self._watch_cache(address, channel))
            await left.wait()
            self._cluster.remove(client)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._budget_s):
                    while client.num_live:  # noqa: ASYNC110  (an event would cost every request)
                        await asyncio.sleep(_LOOK_S)
            serving.cancel()
            moving.cancel()
            watching.cancel()
            self._clients.remove(client)
            self._shapes.pop(client, None)
            self._send_peers()

    def _moved(self, client: DecodeClient, left: asyncio.Event) -> None:
        """Handle a new Status of `client`, or the end of its stream."""
        if left.is_set():
            return
        if client.status is None:
            broke = bool(self._shapes.get(client)) and not client.ended_in_order
            self._state.lost(client.address, broke=broke)
        elif client.drains:
            self._state.drains(client.address)
        # A change of page counts alone does not need a survey.
        shape = _shape(client.status)
        if shape != self._shapes.get(client):
            self._shapes[client] = shape
            self._state.request_survey()
        self._cluster.status_changed(client)

    def _pulsed(self, client: DecodeClient, left: asyncio.Event) -> None:
        """Handle a change of liveness, which also changes the node's description."""
        if not left.is_set():
            self._state.request_survey()
            self._cluster.heard(client)

    def _peers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._prefill))[:MAX_ADDRESSES]

    def _others(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(client.address for client in self._clients))[:MAX_ADDRESSES]

    def _send_peers(self) -> None:
        for client in self._clients:
            client.set_peers(self._peers(), self._others())


def _shape(status: decode_pb2.Status | None) -> tuple[str, ...]:
    """Return the fields of a Status on which the usability of nodes depends."""
    return (status.state, *(link.peer for link in status.links)) if status else ()


async def evacuate(client: DecodeClient) -> None:
    """Migrate requests away from a node whenever it drains, a few at a time."""
    under_way: set[asyncio.Task[MigrationOutcome]] = set()
    while True:
        await client.draining.wait()
        under_way = {task for task in under_way if not task.done()}
        waiting = (each for each in tuple(client.migratable) if each.movable)
        for each, _ in zip(waiting, range(MOST_AT_ONCE - len(under_way)), strict=False):
            under_way.add(each.migrate())
        if under_way:
            await asyncio.wait(under_way, timeout=_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(_AGAIN_S)
