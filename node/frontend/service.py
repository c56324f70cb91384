"""The Node service: calls of operators and routers to a node, the same for every role."""

import asyncio
import itertools
import os
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from common.config import check_adapter_name
from common.errors import InvalidRequest, NodeUnavailable, Overloaded, ServingError, cut
from common.pausing import memory_tags, pause_mode
from common.queueing import QueueBacklog
from common.requests.namespace import check_identity
from common.requests.timeline import RequestTraces, traces_to_proto
from common.rpc import check_address
from common.rpc.streams import OutgoingStream
from kvtransfer.ports import ProducerUp
from node.frontend.engine_link import EngineLink, EngineSupervisor
from node.messages import (
    AbortRequests,
    CacheEventBatch,
    Command,
    ContinueGeneration,
    DescribeNode,
    ExplainRequests,
    FlushCache,
    LoadAdapter,
    NodeCallResult,
    PauseGeneration,
    PrepareWeights,
    PutWeights,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    TakeWeights,
    UnloadAdapter,
    WatchCache,
)
from protos import node_pb2, node_pb2_grpc, router_pb2

MAX_WATCHERS = 64
MAX_UNSENT_BYTES = 16 << 20  # per watcher; twice a snapshot of 1 Mi pages


@dataclass(slots=True, eq=False)
class _Watcher:
    host: str
    outgoing: OutgoingStream[node_pb2.CacheEvents] = field(
        default_factory=lambda: OutgoingStream(max_bytes=MAX_UNSENT_BYTES)
    )
    begun: bool = False  # whether the snapshot has been sent


class CacheFeed:
    """The frontend's side of Node.WatchCache: streams of the prefix cache's content and changes.
    Event loop only.

    Each watcher has its own stream, which starts with a snapshot. At the limit, the host with the
    most watchers loses one, so it cannot displace other hosts.
    """

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._watchers: dict[int, _Watcher] = {}

    async def watch(
        self, host: str, write: Callable[[node_pb2.CacheEvents], Awaitable[None]]
    ) -> None:
        """Write a snapshot, then every change, until cancelled.

        Raises:
            NodeUnavailable: the engine is not ready, or the node ends.
            Overloaded: another watcher displaced it, or it does not read.
        """
        self._engine.check_ready()
        if len(self._watchers) >= MAX_WATCHERS:
            self._make_room()
        number, watcher = next(self._numbers), _Watcher(host)
        self._watchers[number] = watcher
        self._engine.send(WatchCache(number, on=True))
        try:
            await watcher.outgoing.converse(write, _nothing(), _ignore)
        finally:
            self._watchers.pop(number, None)
            self._engine.send(WatchCache(number, on=False))

    def _make_room(self) -> None:
        """End the oldest watcher of the host with the most watchers. If it reconnects, it gets a
        new snapshot.
        """
        hosts = Counter(watcher.host for watcher in self._watchers.values())
        [(greediest, _)] = hosts.most_common(1)
        oldest = next(n for n, watcher in self._watchers.items() if watcher.host == greediest)
        self._watchers.pop(oldest).outgoing.end(
            Overloaded(f"more than {MAX_WATCHERS} calls watch the cache")
        )

    def changed(self, change: CacheEventBatch) -> None:
        """Send a change to new watchers, or to all that have their snapshot."""
        events = node_pb2.CacheEvents(
            page_size=change.page_size,
            cleared=change.cleared,
            stored=_integers(change.stored),
            removed=_integers(change.removed),
        )
        for number in change.watchers or self._watchers:
            watcher = self._watchers.get(number)
            if watcher is None:
                continue  # it has disconnected meanwhile
            watcher.begun = watcher.begun or bool(change.watchers)
            if watcher.begun:
                watcher.outgoing.put(events)

    def end(self, error: ServingError) -> None:
        for watcher in self._watchers.values():
            watcher.outgoing.close(error)


def _integers(packed: bytes) -> "array[int]":
    integers = array("Q")
    integers.frombytes(packed)
    return integers


async def _nothing() -> AsyncIterator[None]:
    """Yield the messages of a watcher after its request: none. Waits until cancelled."""
    await asyncio.Event().wait()
    yield


async def _ignore(_: None) -> None: ...


MAX_PATH_CHARACTERS = 1024
LOAD_S = 60.0  # longest time to read an adapter
WEIGHTS_S = 600.0  # longest time to read weights
PROFILE_S = 60.0  # longest time to write a trace
PROFILE_STEPS, MAX_PROFILE_STEPS = 20, 1000
PAUSE_S = 60.0  # longest time for launched work to end, and for other nodes to read its results
ROLES = ("prefill", "decode")


class NodeIdentity(NamedTuple):
    """The constant part of a node's description.

    Attributes:
        mode: mode of a decode node, else empty.
        model: name until the engine reports it.
        group, group_rank: data-parallel group of the node. "": it is in none.
    """

    role: str
    mode: str
    model: str
    instance: int
    engine_pid: int
    group: str = ""
    group_rank: int = 0


def _link_state(link: ProducerUp) -> router_pb2.LinkState:
    return router_pb2.LinkState(
        peer=link.address,
        path=link.path,
        gib_per_s=link.gib_per_s,
        members=[router_pb2.LinkMember(**msgspec.structs.asdict(each)) for each in link.members],
    )


def _ranks(
    pids: Sequence[int], devices: Sequence[str], gauges: Mapping[str, float]
) -> Iterator[router_pb2.RankState]:
    """Yield the state of each rank.

    Args:
        gauges: from the engine's latest report.
    """
    for rank, (pid, device) in enumerate(zip(pids, devices, strict=True)):
        yield router_pb2.RankState(
            rank=rank,
            pid=pid,
            device=device,
            memory_bytes=int(gauges.get(f"rank_memory/{rank}", 0)),
            steps_behind=int(gauges.get(f"rank_behind/{rank}", 0)),
        )


def _call(
    command: Callable[[Any], Command],
    response: Callable[[NodeCallResult], Any],
    timeout_s: float = 5.0,
) -> Any:
    """Return a method of NodeService that is one call of the engine. It fails with
    FAILED_PRECONDITION if the engine rejects the command, and with DEADLINE_EXCEEDED if it has not
    carried it out in time. The engine continues nevertheless.

    Args:
        command: returns the command of a request. Raises InvalidRequest.
        response: returns the response for the engine's result.
    """

    async def method(self: "NodeService", request: Any, context: Any) -> Any:
        return response(await self.engine.ask(command(request), timeout_s=timeout_s))

    return method


class NodeService(node_pb2_grpc.NodeServicer):
    """Forwards calls to the engine thread. Responds itself only while the engine starts.

    Args:
        drain: begins the drain. Called with its cause.
        switch: changes to the role of that name. Returns when that role is about to begin.
        pair_with: pairs with the node at that address from now on. Raises FailedPrecondition if it
            cannot.
    """

    def __init__(
        self,
        *,
        identity: NodeIdentity,
        engine: EngineLink,
        supervision: EngineSupervisor,
        cache_feed: CacheFeed,
        drain: Callable[[str], None],
        switch: Callable[[str], Awaitable[None]],
        pair_with: Callable[[str], None],
    ) -> None:
        self._identity = identity
        self.engine = engine
        self._supervision = supervision
        self._cache_feed = cache_feed
        self._drain = drain
        self._switch = switch
        self._pair_with = pair_with

    async def Describe(
        self, request: node_pb2.DescribeRequest, context: Any
    ) -> node_pb2.DescribeResponse:
        """Describe the node. While the model loads, only role, instance, pids, state, model and
        group are set. A stalled engine is not called: pages, queues, steps and counters are unset.
        """
        ready, identity = self._supervision.ready, self._identity
        reply = node_pb2.DescribeResponse(
            role=identity.role,
            mode=identity.mode,
            instance_id=identity.instance,
            pids=(os.getpid(), identity.engine_pid),
            state=self._supervision.state(time.monotonic()),
            model=ready.model if ready else identity.model,
            group=identity.group,
            group_rank=identity.group_rank,
        )
        if ready is None:
            return reply
        reply.pids.extend(ready.followers)
        if self._supervision.moves(time.monotonic()):
            description = (await self.engine.ask(DescribeNode())).description or {}
        else:
            description = {}
        moving = self._supervision.moving
        if ready.followers:
            pids = (identity.engine_pid, *ready.followers)
            reply.ranks.extend(_ranks(pids, ready.devices, moving.gauges if moving else {}))
        reply.fingerprint = self._supervision.fingerprint
        reply.tokenizer_hash = ready.tokenizer_hash
        reply.context_length = ready.context_length
        reply.pages.update(description.get("pages", {}))
        reply.queues.update(description.get("queues", {}))
        counters = dict(description.get("counters", {}))
        reply.steps = counters.pop("steps", 0)
        reply.counters.update(counters)
        if moving is not None:
            reply.weights = moving.weights
            queued_s, token_s = moving.backlogs.get("prompts", QueueBacklog())
            reply.prompts.CopyFrom(router_pb2.Backlog(queued_s=queued_s, token_s=token_s))
        reply.links.extend(map(_link_state, moving.links if moving else ()))
        return reply

    async def Drain(self, request: node_pb2.DrainRequest, context: Any) -> node_pb2.DrainResponse:
        """Begin to drain and return. The node exits when it has finished."""
        self._drain("a Drain call")
        return node_pb2.DrainResponse()

    async def Switch(
        self, request: node_pb2.SwitchRequest, context: Any
    ) -> node_pb2.SwitchResponse:
        """Change the role. Fails with FAILED_PRECONDITION or DEADLINE_EXCEEDED if the node keeps
        its role. Cancelling the call does not cancel the change.
        """
        if request.role not in ROLES:
            raise InvalidRequest(
                f"role: {cut(request.role)!r} is invalid: expected {', '.join(ROLES)}"
            )
        await self._switch(request.role)
        return node_pb2.SwitchResponse()

    FlushCache = _call(
        lambda request: FlushCache(),
        lambda result: router_pb2.FlushCacheResponse(pages_freed=result.integer),
    )

    async def WatchCache(self, request: node_pb2.WatchCacheRequest, context: Any) -> None:
        """Stream the prefix cache's content and changes. Fails with UNAVAILABLE while the model
        loads, and with RESOURCE_EXHAUSTED if the caller does not read or another one displaces it.
        """
        host, _, _ = context.peer().rpartition(":")
        await self._cache_feed.watch(host, context.write)

    Abort = _call(
        lambda request: AbortRequests(_request_id(request)),
        lambda result: node_pb2.AbortResponse(aborted=result.integer),
    )
    LoadAdapter = _call(
        lambda request: LoadAdapter(_name(request), _path(request)),
        lambda result: router_pb2.LoadAdapterResponse(
            id=result.adapter, fresh=bool(result.integer)
        ),
        LOAD_S,
    )
    UnloadAdapter = _call(
        lambda request: UnloadAdapter(_name(request)),
        lambda result: router_pb2.UnloadAdapterResponse(known=bool(result.integer)),
    )
    Pause = _call(
        lambda request: PauseGeneration(pause_mode(request.mode)),
        lambda result: router_pb2.PauseResponse(fresh=result.fresh, aborted=result.integer),
        PAUSE_S,
    )
    Continue = _call(
        lambda request: ContinueGeneration(),
        lambda result: router_pb2.ContinueResponse(was_paused=bool(result.integer)),
    )
    PrepareWeights = _call(
        lambda request: PrepareWeights(_path(request)),
        lambda result: node_pb2.PrepareWeightsResponse(id=result.weights),
        WEIGHTS_S,
    )
    PutWeights = _call(
        lambda request: PutWeights(check_identity("weights", request.id)),
        lambda result: node_pb2.PutWeightsResponse(),
        WEIGHTS_S,
    )
    ReleaseMemory = _call(
        lambda request: ReleaseMemory(memory_tags(request.tags)),
        lambda result: router_pb2.ReleaseMemoryResponse(),
        WEIGHTS_S,
    )
    ResumeMemory = _call(
        lambda request: ResumeMemory(memory_tags(request.tags)),
        lambda result: router_pb2.ResumeMemoryResponse(),
        WEIGHTS_S,
    )
    StartProfile = _call(
        lambda request: StartProfile(_num_steps(request)),
        lambda result: node_pb2.ProfileResponse(path=result.path),
        PROFILE_S,
    )
    StopProfile = _call(
        lambda request: StopProfile(),
        lambda result: node_pb2.ProfileResponse(path=result.path),
        PROFILE_S,
    )

    async def TakeWeights(
        self, request: node_pb2.TakeWeightsRequest, context: Any
    ) -> node_pb2.TakeWeightsResponse:
        """Copy another node's weights. Fails with FAILED_PRECONDITION if the old ones stay."""
        weights, address = check_identity("weights", request.id), check_address(request.address)
        self._pair_with(address)
        await self.engine.ask(TakeWeights(weights, address), timeout_s=WEIGHTS_S)
        return node_pb2.TakeWeightsResponse()

    async def Explain(
        self, request: node_pb2.ExplainHereRequest, context: Any
    ) -> node_pb2.ExplainHereResponse:
        """Return the history of requests with an id. Fails with UNAVAILABLE while the engine is
        stalled, because only the engine has it.
        """
        request_id = _request_id(request)
        if self._supervision.ready and not self._supervision.moves(time.monotonic()):
            raise NodeUnavailable("the engine of the node is stalled")
        answer = await self.engine.ask(ExplainRequests(request_id))
        return traces_to_proto(answer.flights or RequestTraces((), 0))


def _request_id(request: Any) -> str:
    if not request.request_id:
        raise InvalidRequest("request_id is empty")
    return str(request.request_id)


def _path(request: Any) -> str:
    if not 0 < len(request.path) <= MAX_PATH_CHARACTERS:
        raise InvalidRequest(f"path: 1 to {MAX_PATH_CHARACTERS} characters")
    return str(request.path)


def _name(request: Any) -> str:
    try:
        return check_adapter_name(request.name)
    except ValueError as error:
        raise InvalidRequest(f"name: {error}") from None


def _num_steps(request: router_pb2.StartProfileRequest) -> int:
    if request.num_steps > MAX_PROFILE_STEPS:
        raise InvalidRequest(f"num_steps: {MAX_PROFILE_STEPS} at most")
    return request.num_steps or PROFILE_STEPS
