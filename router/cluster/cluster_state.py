"""State of every node, polled to exclude unhealthy and incompatible nodes and for operators.

A node whose tokenizer differs from the router's would return wrong text, so it gets no requests. A
node counts with the role that it reports, not with the role that its address was configured with.
`ask_all` sends an operator's call to all nodes, and NodeDescriber asks all nodes about one request.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import methodcaller
from typing import Any, get_args

import grpc.aio

from common import rpc
from common.errors import cut
from common.logs import kv
from common.requests.timeline import RequestTraces, traces_from_proto
from protos import node_pb2, node_pb2_grpc
from router.cluster.sources import Role

log = logging.getLogger(__name__)

LEFT = "it left the cluster"


class NodeMember:
    """A member and the state from its last description, "" before the first one."""

    def __init__(self, role: str, address: str, channel: grpc.aio.Channel) -> None:
        self.role = role
        self.address = address
        self.stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        self.state = ""
        self.engine_silent = False
        self.instance = 0  # instance id that reported the state
        self.num_lives = 1  # incremented whenever the node is lost
        self.silence = ""  # reason why it did not respond, or ""
        self.leaving = False  # its last report said that it drains


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """Outcome of a call to one node. `problem` names the node and its error, or is ""."""

    member: NodeMember
    answer: Any = None
    problem: str = ""


async def ask_all(
    members: Sequence[NodeMember], method: str, request: Any, longest_s: float
) -> list[BroadcastResult]:
    """Call a method of all members in parallel. Returns the results in the order of the members.

    Args:
        method: name of a method of the Node service.
        longest_s: time limit of each call in seconds.
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
    """Call a method of one node. Returns the response and "", or None and the reason.

    Args:
        longest_s: time limit in seconds.
        max_bytes: largest accepted response.
    """
    try:
        answer = await methodcaller(method, request, timeout=longest_s)(member.stub)
    except grpc.aio.AioRpcError as error:
        return None, cut(error.details() or error.code().name)
    except asyncio.CancelledError:
        rpc.raise_if_cancelled()
        return None, LEFT  # only this call was cancelled, because the node left
    if answer is None:  # grpcio returns None for bytes that it cannot parse
        return None, "invalid message"
    if max_bytes is not None and answer.ByteSize() > max_bytes:
        return None, f"its response has {answer.ByteSize()} bytes, at most {max_bytes} allowed"
    return answer, ""


_DEADLINE_S = 2.0
_INTERVAL_S = 1.0  # short, because a prefill node's speed and queue time change quickly
_MAX_BYTES = 256 << 10  # limit of a description; with links to 1000 nodes it has 50 KB
_MAX_HISTORY_BYTES = 1 << 20  # limit of a node's data about one request
_STATES = ("starting", "ready", "paused", "draining", "unhealthy")
_NOT_FOR_REQUESTS = ("", "draining", "unhealthy")


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Latest description of one node."""

    role: str  # "prefill" | "decode" | "encode": the expected role
    address: str
    state: str  # as in ClusterNode
    description: node_pb2.DescribeResponse | None  # None: unreachable
    engine_silent: bool = False  # and there is no other problem
    at: float = field(default_factory=time.monotonic)


class ClusterState:
    """Last known state of all nodes. For one event loop.

    Attributes:
        on_change: called when `fit` of a node may have changed.
        on_reports: called with the reports of all nodes after each survey.
        on_role: called with the address of a node whose reported role differs from its configured
            role. The node gets no requests until it joins again with the reported role.
    """

    def __init__(
        self,
        *,
        tokenizer_hash: str,
        other_models: Collection[str] = (),
        on_stream_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            tokenizer_hash: hash of the tokenizer of these nodes' model.
            other_models: names of the router's other models. A node with such a model gets no
                requests here, even if its tokenizer is the same.
            on_stream_lost: called when the stream of a decode node breaks.
        """
        self.on_change: Callable[[], None] = lambda: None
        self.on_reports: list[Callable[[Sequence[NodeReport]], None]] = []
        self.on_role: Callable[[str, Role], None] = lambda address, role: None
        self._on_stream_lost = on_stream_lost
        self._tokenizer_hash = tokenizer_hash
        self._other_models = frozenset(other_models)
        self._known: dict[str, NodeMember] = {}
        self._survey: asyncio.Task[list[NodeReport]] | None = None
        self._survey_requested = asyncio.Event()

    def join(self, role: str, address: str, channel: grpc.aio.Channel) -> None:
        """Add a node.

        Args:
            role: "prefill" | "decode" | "encode".
            channel: owned by the caller.
        """
        self._known[address] = NodeMember(role, address, channel)
        self.request_survey()

    def leave(self, address: str) -> None:
        """Remove a node. It is no longer polled, and `fit` returns False for it."""
        del self._known[address]

    @property
    def members(self) -> Sequence[NodeMember]:
        return tuple(self._known.values())

    @property
    def serving(self) -> Sequence[NodeMember]:
        """Prefill and decode nodes, whose weights, KV and adapters operators change together."""
        return tuple(known for known in self._known.values() if known.role != "encode")

    def fit(self, address: str, role: Role) -> bool:
        """Return whether the node has that role and its last description allows requests.

        False before the first description.
        """
        known = self._known.get(address)
        return known is not None and known.role == role and known.state not in _NOT_FOR_REQUESTS

    def ready_instance(self, address: str) -> int:
        """Return the instance id of the node at an address, or 0 if it is not ready."""
        known = self._known.get(address)
        return known.instance if known is not None and known.state == "ready" else 0

    def paused(self, address: str) -> bool:
        """Return whether the node was paused at its last report."""
        known = self._known.get(address)
        return known is not None and known.state == "paused"

    def silent(self, address: str) -> bool:
        """Return whether a silent engine was the only problem in the node's last report."""
        known = self._known.get(address)
        return known is not None and known.engine_silent

    def lost(self, address: str, *, broke: bool) -> None:
        """Drop the state of a lost node. Another node may appear at its address.

        Args:
            broke: its stream ended although the node had not drained.
        """
        if broke:
            self._on_stream_lost()
        known = self._known.get(address)
        if known is not None:
            known.state, known.engine_silent = "", False
            known.num_lives += 1

    def drains(self, address: str) -> None:
        """Record that a node reports on its stream that it drains.

        It may stop before the next survey.
        """
        known = self._known.get(address)
        if known is not None:
            known.leaving = True

    def request_survey(self) -> None:
        """Request a survey soon instead of at the next interval."""
        self._survey_requested.set()

    async def run(self) -> None:
        """Poll all nodes at each interval and when `request_survey` was called, until cancelled."""
        while True:
            self._survey_requested.clear()
            # Do not share a survey in progress: it may have begun before the change.
            await self._survey_now()
            try:
                async with asyncio.timeout(_INTERVAL_S):
                    await self._survey_requested.wait()
            except TimeoutError:
                continue

    async def survey(self) -> list[NodeReport]:
        """Return the reports of all nodes within 2 s, prefill nodes first.

        Concurrent callers share one survey.
        """
        if self._survey is None or self._survey.done():
            self._survey = asyncio.create_task(self._survey_now())
        # The cancellation of one caller must not cancel the survey of the others.
        return await asyncio.shield(self._survey)

    async def _survey_now(self) -> list[NodeReport]:
        known = sorted(self._known.values(), key=lambda each: each.role != "prefill")
        reports = await asyncio.gather(*(self._ask(each) for each in known))
        for receive in self.on_reports:
            receive(reports)
        return reports

    async def _ask(self, known: NodeMember) -> NodeReport:
        life = known.num_lives
        report = await self._report(known)
        described = report.description
        if described is None:
            # Keep the last state: the loss of a node is reported by its stream. Encode nodes have
            # no stream to the router.
            if known.role == "encode" and known.state:
                known.state = ""
                self.on_change()
            return report
        # A description from before the loss does not apply to the node that came back.
        if known.num_lives == life and known.state != report.state:
            known.state, known.engine_silent = report.state, report.engine_silent
            known.instance = described.instance_id
            self.on_change()
        if self._known.get(known.address) is known:
            for role in get_args(Role):
                if described.role == role != known.role:
                    self.on_role(known.address, role)
        return report

    async def _report(self, known: NodeMember) -> NodeReport:
        description, problem = await ask(
            known, "Describe", node_pb2.DescribeRequest(), _DEADLINE_S, _MAX_BYTES
        )
        if description is None:
            if problem != LEFT:
                self._not_answered(known, problem)
            return NodeReport(known.role, known.address, "unreachable", None)
        known.silence = ""
        known.leaving = description.state == "draining"
        mismatch = self._incompatibility(description)
        if mismatch and known.state != "unhealthy":
            log.warning("%s and gets no requests %s", mismatch, kv(node=known.address))
        if mismatch or description.role != known.role:
            return NodeReport(known.role, known.address, "unhealthy", description)
        state = description.state
        return NodeReport(known.role, known.address, state, description, state == "unhealthy")

    def _not_answered(self, known: NodeMember, reason: str) -> None:
        if reason != known.silence:
            known.silence = reason
            level = logging.INFO if known.leaving else logging.WARNING
            log.log(level, "node does not respond %s", kv(node=known.address, reason=reason))

    def _incompatibility(self, description: node_pb2.DescribeResponse) -> str:
        """Return why a healthy node gets no requests, or "" if it gets requests."""
        if description.tokenizer_hash not in ("", self._tokenizer_hash):
            return "a node has another tokenizer"
        if description.model in self._other_models:
            return "a node is listed for one model and serves another model of this router"
        if description.state not in _STATES:
            return "a node reports an unknown state"
        if description.role not in get_args(Role):
            return "a node reports an unknown role"
        return ""


@dataclass(frozen=True, slots=True)
class DescribeResult:
    """One node's answer about a request.

    Attributes:
        at: time.monotonic() of its arrival. An engine answers after its current step, so the
            content is up to one call older.
        problem: why there is no answer, or "".
    """

    role: str
    address: str
    at: float
    flights: RequestTraces
    problem: str = ""


class NodeDescriber:
    """Asks all nodes what they know about one request. For one event loop.

    Args:
        states: one ClusterState for each model.
    """

    def __init__(self, states: Sequence[ClusterState]) -> None:
        self._states = states

    async def ask(self, request_id: str) -> list[DescribeResult]:
        """Return the answers of all nodes within 2 s, prefill nodes first. Raises nothing."""
        known = chain.from_iterable(state.members for state in self._states)
        members = sorted(known, key=lambda member: member.role != "prefill")
        return list(await asyncio.gather(*(_history(member, request_id) for member in members)))


async def _history(member: NodeMember, request_id: str) -> DescribeResult:
    request = node_pb2.ExplainHereRequest(request_id=request_id)
    answer, problem = await ask(member, "Explain", request, _DEADLINE_S, _MAX_HISTORY_BYTES)
    traces = RequestTraces((), 0) if answer is None else traces_from_proto(answer)
    return DescribeResult(member.role, member.address, time.monotonic(), traces, problem)
