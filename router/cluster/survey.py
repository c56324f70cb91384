"""Asks every node to describe itself: for operators, and to keep misfits from requests.

A node whose tokenizer differs from the router's would answer with other words: it gets nothing. A
node has the role that it says itself, wherever it was found.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import grpc.aio

from common import rpc
from common.logs import kv
from protos import node_pb2, node_pb2_grpc
from router.cluster.sources import Role

log = logging.getLogger(__name__)

_DEADLINE_S = 2.0
_INTERVAL_S = 1.0  # how fast a prefill node is, and so how long its queue takes, may change soon
_MAX_BYTES = 256 << 10  # of a description; of a node with links to 1000 others it has 50 KB
_STATES = ("starting", "ready", "paused", "draining", "unhealthy")
_NOT_FOR_REQUESTS = ("", "draining", "unhealthy")


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node as it described itself just now."""

    role: str  # "prefill" | "decode", as it was known until now
    address: str
    state: str  # as in ClusterNode
    description: node_pb2.DescribeResponse | None  # None: unreachable
    engine_silent: bool = False  # which is all that is wrong with it
    at: float = field(default_factory=time.monotonic)


class Member(Protocol):
    """Somebody to ask."""

    @property
    def role(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def stub(self) -> Any:
        """Of its Node service."""
        ...


class _Known:
    """A member, and what its last description made of it: "" before the first."""

    def __init__(self, role: str, address: str, channel: grpc.aio.Channel) -> None:
        self.role = role
        self.address = address
        self.stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        self.state = ""
        self.engine_silent = False
        self.instance = 0  # that has said so
        self.num_lives = 1  # one more whenever it was gone
        self.silence = ""  # why it did not answer; "" if it did
        self.leaving = False  # it drained when it was heard last


class Survey:
    """For one event loop."""

    def __init__(
        self,
        *,
        tokenizer_hash: str,
        on_change: Callable[[], None],
        on_reports: Callable[[Sequence[NodeReport]], None] = lambda _: None,
        on_role: Callable[[str, Role], None] = lambda address, role: None,
    ) -> None:
        """
        Args:
            on_change: called when `fit` of some node may have changed.
            on_reports: called with every node's report, whenever all have been asked.
            on_role: called with the address of a node that has another role than it has joined
                with. It gets nothing until it joins with that one.
        """
        self._on_reports = on_reports
        self._on_role = on_role
        self._tokenizer_hash = tokenizer_hash
        self._on_change = on_change
        self._known: dict[str, _Known] = {}
        self._looking: asyncio.Task[list[NodeReport]] | None = None
        self._wanted = asyncio.Event()

    def join(self, role: str, address: str, channel: grpc.aio.Channel) -> None:
        """
        Args:
            role: "prefill" | "decode".
            channel: stays the caller's.
        """
        self._known[address] = _Known(role, address, channel)
        self.want()

    def leave(self, address: str) -> None:
        """Nobody asks the node any more, and it is not fit."""
        del self._known[address]

    @property
    def members(self) -> Sequence[Member]:
        return tuple(self._known.values())

    def fit(self, address: str, role: Role) -> bool:
        """Whether the node has that role, and its last description lets it have requests; False
        before the first."""
        known = self._known.get(address)
        return known is not None and known.role == role and known.state not in _NOT_FOR_REQUESTS

    def ready_instance(self, address: str) -> int:
        """The instance id of the node there, if it has said that it is ready; else 0."""
        known = self._known.get(address)
        return known.instance if known is not None and known.state == "ready" else 0

    def paused(self, address: str) -> bool:
        """Whether the node has last said of itself that it is."""
        known = self._known.get(address)
        return known is not None and known.state == "paused"

    def silent(self, address: str) -> bool:
        """Whether the node has last said of itself that its engine is, and nothing else is wrong
        with it."""
        known = self._known.get(address)
        return known is not None and known.engine_silent

    def forget(self, address: str) -> None:
        """The node at `address` is gone: what comes back there may be another."""
        known = self._known.get(address)
        if known is not None:
            known.state, known.engine_silent = "", False
            known.num_lives += 1

    def drains(self, address: str) -> None:
        """The node at `address` says so on its stream: it may be gone before it is asked again."""
        known = self._known.get(address)
        if known is not None:
            known.leaving = True

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
        """Every node's report, prefill nodes first, within 2 s. Callers at one time share it."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        # A caller that gives up must not take the others' answer with it.
        return await asyncio.shield(self._looking)

    async def _look(self) -> list[NodeReport]:
        known = sorted(self._known.values(), key=lambda each: each.role != "prefill")
        reports = await asyncio.gather(*(self._ask(each) for each in known))
        self._on_reports(reports)
        return reports

    async def _ask(self, known: _Known) -> NodeReport:
        life = known.num_lives
        report = await self._report(known)
        described = report.description
        if described is None:
            # It keeps its last verdict: its stream, not this, says that it is gone.
            return report
        # What a node said before it was gone says nothing of the one that has come back.
        if known.num_lives == life and known.state != report.state:
            known.state, known.engine_silent = report.state, report.engine_silent
            known.instance = described.instance_id
            self._on_change()
        if self._known.get(known.address) is known:
            for role in get_args(Role):
                if described.role == role != known.role:
                    self._on_role(known.address, role)
        return report

    async def _report(self, known: _Known) -> NodeReport:
        unreachable = NodeReport(known.role, known.address, "unreachable", None)
        try:
            description = await known.stub.Describe(node_pb2.DescribeRequest(), timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            self._not_answered(known, error.details() or error.code().name)
            return unreachable
        except asyncio.CancelledError:
            rpc.raise_if_cancelled()
            return unreachable  # the call alone is: its node has left, and its channel is closed
        if description is None:  # what grpcio makes of bytes that it cannot parse
            self._not_answered(known, "it has sent bytes that are no message")
            return unreachable
        if description.ByteSize() > _MAX_BYTES:
            self._not_answered(known, f"it says {description.ByteSize()} bytes of itself")
            return unreachable
        known.silence = ""
        known.leaving = description.state == "draining"
        misfit = self._misfit(description)
        if misfit and known.state != "unhealthy":
            log.warning("%s and gets no requests %s", misfit, kv(node=known.address))
        if misfit or description.role != known.role:
            return NodeReport(known.role, known.address, "unhealthy", description)
        state = description.state
        return NodeReport(known.role, known.address, state, description, state == "unhealthy")

    def _not_answered(self, known: _Known, reason: str) -> None:
        if reason != known.silence:
            known.silence = reason
            level = logging.INFO if known.leaving else logging.WARNING
            log.log(level, "a node does not answer %s", kv(node=known.address, because=reason))

    def _misfit(self, description: node_pb2.DescribeResponse) -> str:
        """What keeps requests from a node that is well; "" if nothing does."""
        if description.tokenizer_hash not in ("", self._tokenizer_hash):
            return "a node has another tokenizer"
        if description.state not in _STATES:
            return "a node is in no state that there is"
        if description.role not in get_args(Role):
            return "a node has no role that there is"
        return ""
