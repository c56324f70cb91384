"""Asks every node to describe itself: for operators, and to keep misfits from requests.

A node whose tokenizer differs from the router's would answer with other words: it gets nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc.aio

from common.logs import kv
from protos import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

_DEADLINE_S = 2.0
_INTERVAL_S = 5.0
_NOT_FOR_REQUESTS = ("draining", "unhealthy")


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node as it described itself just now."""

    role: str  # "prefill" | "decode", as configured
    address: str
    state: str  # as in ClusterNode
    description: node_pb2.DescribeResponse | None  # None: unreachable


class Survey:
    """For one event loop."""

    def __init__(
        self,
        roles: Mapping[str, str],
        channels: Mapping[str, grpc.aio.Channel],
        *,
        tokenizer_hash: str,
        on_change: Callable[[], None],
    ) -> None:
        """
        Args:
            roles: address of each node: "prefill" | "decode".
            on_change: called when `fit` of some node may have changed.
        """
        self._roles = roles
        self._stubs = {
            address: node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
            for address, channel in channels.items()
        }
        self._tokenizer_hash = tokenizer_hash
        self._on_change = on_change
        self._states: dict[str, str] = {}
        self._looking: asyncio.Task[list[NodeReport]] | None = None
        self._wanted = asyncio.Event()

    def fit(self, address: str) -> bool:
        """Whether the node's last description lets it have requests; False before the first."""
        return self._states.get(address, "unhealthy") not in _NOT_FOR_REQUESTS

    def forget(self, address: str) -> None:
        """The node at `address` is gone: what comes back there may be another."""
        self._states.pop(address, None)

    def want(self) -> None:
        """Something has changed: look soon, not at the next interval."""
        self._wanted.set()

    async def run(self) -> None:
        """Looks when wanted and at every interval, until cancelled."""
        while True:
            self._wanted.clear()
            # Never one that is shared: it may have begun before the change.
            await self._look()
            try:
                async with asyncio.timeout(_INTERVAL_S):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    async def look(self) -> list[NodeReport]:
        """Every node's report, as configured in order, within 2 s. Callers at one time share it."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        # A caller that gives up must not take the others' answer with it.
        return await asyncio.shield(self._looking)

    async def _look(self) -> list[NodeReport]:
        reports = await asyncio.gather(*(self._ask(address) for address in self._roles))
        for report in reports:
            # An unreachable node keeps its last verdict: its stream, not this, says it is gone.
            if report.description is not None:
                self._states[report.address] = report.state
        self._on_change()
        return reports

    async def _ask(self, address: str) -> NodeReport:
        role = self._roles[address]
        try:
            description = await self._stubs[address].Describe(
                node_pb2.DescribeRequest(), timeout=_DEADLINE_S
            )
        except grpc.aio.AioRpcError:
            return NodeReport(role, address, "unreachable", None)
        if description.tokenizer_hash not in ("", self._tokenizer_hash):
            if self._states.get(address) != "unhealthy":
                log.warning(
                    "a node has another tokenizer and gets no requests %s", kv(node=address)
                )
            return NodeReport(role, address, "unhealthy", description)
        return NodeReport(role, address, description.state, description)
