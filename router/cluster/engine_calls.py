"""Operator calls to the engines of all nodes: pause, weights, memory, caches, LoRA adapters."""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from common.config import check_adapter_name
from common.errors import FailedPrecondition, InvalidRequest, NotFound
from common.pausing import PauseMode, memory_tags, pause_mode
from common.requests.namespace import WeightsId
from protos import node_pb2
from protos import router_pb2 as pb
from router.cluster.cluster import Cluster
from router.cluster.cluster_state import BroadcastResult, ClusterState, NodeMember, ask_all

_PAUSE_S = 65.0  # seconds; longer than a node takes
_WEIGHTS_S = 605.0
_PROFILE_S = 65.0
_PAIRS_S = 30.0
_LOOK_S = 0.1
_ANSWER_S = 10.0


class EngineCalls:
    """Operator calls to all engines: the methods of the Router service. For one event loop."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    async def pause(self, request: pb.PauseRequest) -> pb.PauseResponse:
        """Pause all nodes. When this returns, no node starts another step.

        Decode nodes are paused first, because they cancel prompts on prefill nodes. After an error,
        only nodes that were paused before stay paused.

        Raises:
            InvalidRequest: the mode is unknown.
            FailedPrecondition: a node did not pause or respond, or there is no node.
        """
        return await self._pause(pause_mode(request.mode), self._state.serving)

    async def _pause(self, mode: PauseMode, members: Sequence[NodeMember]) -> pb.PauseResponse:
        request = pb.PauseRequest(mode=mode.value)
        results: list[BroadcastResult] = []
        for of_role in _by_role(members, "decode", "prefill"):
            results += await ask_all(of_role, "Pause", request, _PAUSE_S)
            if any(each.problem for each in results):
                fresh = [each.member for each in results if each.answer and each.answer.fresh]
                late = [each.member for each in results if each.problem]
                await self._continue([*fresh, *late])
                raise FailedPrecondition(_problems(results))
        if not results:
            raise FailedPrecondition("there is no node to pause")
        return pb.PauseResponse(
            fresh=any(each.answer.fresh for each in results),
            aborted=sum(each.answer.aborted for each in results if each.member.role == "decode"),
        )

    async def resume(self, request: pb.ContinueRequest) -> pb.ContinueResponse:
        """Resume all nodes.

        Raises:
            FailedPrecondition: a node did not respond. The others are resumed.
        """
        return await self._resume(self._state.serving)

    async def _resume(self, members: Sequence[NodeMember]) -> pb.ContinueResponse:
        results: list[BroadcastResult] = []
        for of_role in _by_role(members, "prefill", "decode"):
            results += await self._continue(of_role)
        _check(results)
        return pb.ContinueResponse(was_paused=any(each.answer.was_paused for each in results))

    async def update_weights(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        """Update the weights of all nodes, from a path on the nodes or from one node.

        Requests in flight are aborted, or recomputed from their tokens.

        Raises:
            InvalidRequest: the request has both sources. A node rejected the weights or did not
                respond, or nodes read different weights. Nothing has changed.
            FailedPrecondition: a node could not be paused, and nothing has changed. Or a node was
                not updated, and the nodes that should change stay paused.
        """
        mode = PauseMode.ABORT if request.abort else PauseMode.RETRACT
        if not request.from_node:
            return await self._read_weights(request.path, mode)
        if request.path:
            raise InvalidRequest("from_node: cannot be combined with a path")
        return await self._take_weights(request.from_node, mode)

    async def _read_weights(self, path: str, mode: PauseMode) -> pb.UpdateWeightsResponse:
        """Nodes that were running are paused only while their weights are overwritten."""
        prepared, pairs = await self._prepare(path), await self._pairs()
        paused = await self._pause(mode, self._state.serving)
        request = node_pb2.PutWeightsRequest(id=prepared)
        results = await ask_all(self._state.serving, "PutWeights", request, _WEIGHTS_S)
        if problems := _problems(results):
            raise FailedPrecondition(f"{problems}. All nodes stay paused until this is repeated")
        await self._paired(pairs)
        if paused.fresh:
            await self._resume(self._state.serving)
        return pb.UpdateWeightsResponse(id=prepared, aborted=paused.aborted)

    async def _take_weights(self, producer: str, mode: PauseMode) -> pb.UpdateWeightsResponse:
        """Nodes with other weights are paused while they read the weights."""
        has = {
            report.address: report.description.weights
            for report in await self._state.survey()
            if report.description is not None
        }
        weights, pairs = has.get(producer), await self._pairs()
        if not weights:
            raise InvalidRequest(f"node: {producer} is unknown or does not respond")
        others = [each for each in self._state.serving if each.address != producer]
        receivers = [each for each in others if has.get(each.address) != weights]
        paused = await self._pause(mode, receivers) if receivers else pb.PauseResponse()
        request = node_pb2.TakeWeightsRequest(id=weights, address=producer)
        results = await ask_all(others, "TakeWeights", request, _WEIGHTS_S)
        if problems := _problems(results):
            raise FailedPrecondition(f"{problems}. The nodes that should load them stay paused")
        await self._paired(pairs)
        if paused.fresh:
            await self._resume(receivers)
        return pb.UpdateWeightsResponse(id=weights, aborted=paused.aborted)

    async def _pairs(self) -> frozenset[tuple[str, str]]:
        """Return the addresses of each decode node and each node that it can read from."""
        return frozenset(
            (report.address, link.peer)
            for report in await self._state.survey()
            if report.role == "decode" and report.description is not None
            for link in report.description.links
        )

    async def _paired(self, pairs: frozenset[tuple[str, str]]) -> None:
        """Wait until these pairs are connected again after an update, at most `_PAIRS_S`."""
        until = time.monotonic() + _PAIRS_S
        while time.monotonic() < until:
            if pairs <= await self._pairs():
                return
            await asyncio.sleep(_LOOK_S)

    async def _prepare(self, path: str) -> WeightsId:
        request = node_pb2.PrepareWeightsRequest(path=path)
        results = await ask_all(self._state.serving, "PrepareWeights", request, _WEIGHTS_S)
        if not results:
            raise InvalidRequest("model_path: there is no node to read it")
        if problems := _problems(results):
            raise InvalidRequest(f"model_path: {problems}")
        found: set[WeightsId] = {each.answer.id for each in results}
        if len(found) > 1:
            raise InvalidRequest("model_path: nodes have read different weights there")
        return found.pop()

    async def release_memory(self, request: pb.ReleaseMemoryRequest) -> pb.ReleaseMemoryResponse:
        """Release memory on all nodes. After an error, nodes that had the memory have it again.

        Raises:
            InvalidRequest: a tag is unknown.
            FailedPrecondition: a node failed or did not respond, or there is no node.
        """
        tags = memory_tags(request.tags)
        to_node = pb.ReleaseMemoryRequest(tags=tags)
        results = await ask_all(self._state.serving, "ReleaseMemory", to_node, _WEIGHTS_S)
        if not results:
            raise FailedPrecondition("there is no node whose memory can be released")
        if problems := _problems(results):
            with suppress(FailedPrecondition):
                await self.resume_memory(pb.ResumeMemoryRequest(tags=tags))
            raise FailedPrecondition(problems)
        return pb.ReleaseMemoryResponse()

    async def resume_memory(self, request: pb.ResumeMemoryRequest) -> pb.ResumeMemoryResponse:
        """Allocate released memory again on all nodes.

        Raises:
            InvalidRequest: a tag is unknown.
            FailedPrecondition: a node lacks memory or did not respond. The others have resumed.
        """
        to_node = pb.ResumeMemoryRequest(tags=memory_tags(request.tags))
        await self._done("ResumeMemory", to_node, _WEIGHTS_S)
        return pb.ResumeMemoryResponse()

    async def start_profile(self, request: pb.StartProfileRequest) -> pb.ProfilesResponse:
        """Start a profile on all nodes.

        Raises:
            FailedPrecondition: a node could not start. The others profile.
        """
        return await self._profiled(
            "StartProfile", pb.StartProfileRequest(num_steps=request.num_steps)
        )

    async def stop_profile(self, request: pb.StopProfileRequest) -> pb.ProfilesResponse:
        """Stop the profile on all nodes.

        Raises:
            FailedPrecondition: a node has no trace. The others have written theirs.
        """
        return await self._profiled("StopProfile", pb.StopProfileRequest())

    async def _profiled(self, method: str, request: Any) -> pb.ProfilesResponse:
        results = await self._done(method, request, _PROFILE_S)
        profiles = [
            pb.Profile(role=each.member.role, address=each.member.address, path=each.answer.path)
            for each in results
        ]
        return pb.ProfilesResponse(profiles=profiles)

    async def flush_caches(self, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
        """Flush the prefix caches of all nodes.

        Raises:
            FailedPrecondition: a node has requests or did not respond. The others are flushed.
        """
        results = await self._done("FlushCache", pb.FlushCacheRequest(), _ANSWER_S)
        return pb.FlushCacheResponse(pages_freed=sum(each.answer.pages_freed for each in results))

    async def _done(self, method: str, request: Any, longest_s: float) -> list[BroadcastResult]:
        """Call a method of all nodes. Raise FailedPrecondition unless all succeed."""
        results = await ask_all(self._state.serving, method, request, longest_s)
        _check(results)
        return results

    async def _continue(self, members: Sequence[NodeMember]) -> list[BroadcastResult]:
        return await ask_all(members, "Continue", pb.ContinueRequest(), _ANSWER_S)


def _by_role(members: Sequence[NodeMember], *roles: str) -> Sequence[Sequence[NodeMember]]:
    return [[each for each in members if each.role == role] for role in roles]


def _check(results: Sequence[BroadcastResult]) -> None:
    if any(each.problem for each in results):
        raise FailedPrecondition(_problems(results))


def _problems(results: Sequence[BroadcastResult]) -> str:
    return "; ".join(each.problem for each in results if each.problem)


_LOAD_S = 65.0  # seconds; longer than a node takes
_UNLOAD_S = 10.0
_REPORT_S = 5.0  # longest wait in seconds until the nodes' streams report the change


class AdapterCalls:
    """Operator calls for LoRA adapters. For one event loop.

    Args:
        served: names of all served models. An adapter must not have such a name.
    """

    def __init__(self, state: ClusterState, cluster: Cluster, served: Collection[str]) -> None:
        self._state = state
        self._cluster = cluster
        self._served = served

    async def load(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Load an adapter on all nodes. After an error, only nodes that had it before have it.

        Raises:
            InvalidRequest: a node rejected it or did not respond, or nodes read different adapters.
        """
        name = self._checked(request.name)
        to_node = pb.LoadAdapterRequest(name=name, path=request.path)
        results = await ask_all(self._state.serving, "LoadAdapter", to_node, _LOAD_S)
        if not results:
            raise InvalidRequest("lora_name: there is no node to load it")
        problems = [each.problem for each in results if each.problem]
        loaded = [each for each in results if not each.problem]
        if len({each.answer.id for each in loaded}) > 1:
            problems.append("nodes have read different adapters there")
        if problems:
            fresh = [each.member for each in loaded if each.answer.fresh]
            await self._unload(fresh, name)
            raise InvalidRequest(f"lora_path: {'; '.join(problems)}")
        answer: pb.LoadAdapterResponse = loaded[0].answer
        await self._cluster.adapters.until(name, answer.id, _REPORT_S)
        return answer

    async def unload(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Unload an adapter. Running requests continue with it, and new ones cannot use it.

        Raises:
            NotFound: no node has it.
            InvalidRequest: a node did not respond.
        """
        name = self._checked(request.name)
        results = await self._unload(self._state.serving, name)
        if problems := _problems(results):
            raise InvalidRequest(f"lora_name: {problems}")
        if not any(each.answer.known for each in results):
            raise NotFound(f"lora_name: adapter {name!r} is not loaded")
        await self._cluster.adapters.until(name, None, _REPORT_S)
        return pb.UnloadAdapterResponse(known=True)

    async def _unload(self, members: Sequence[NodeMember], name: str) -> list[BroadcastResult]:
        request = pb.UnloadAdapterRequest(name=name)
        return await ask_all(members, "UnloadAdapter", request, _UNLOAD_S)

    def _checked(self, name: str) -> str:
        try:
            check_adapter_name(name)
        except ValueError as error:
            raise InvalidRequest(f"lora_name: {error}") from None
        if name in self._served:
            raise InvalidRequest(f"lora_name: {name!r} is the name of a model")
        return name
