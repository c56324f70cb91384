"""What operators ask of the engines of all nodes at once: pauses, other weights, empty caches."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from common.errors import InvalidRequest, WrongState
from common.memory_tags import memory_tags
from common.pause_mode import PauseMode, pause_mode
from common.requests.weights import WeightsId
from protos import node_pb2, router_pb2
from router.cluster.fan_out import Said, ask_all
from router.cluster.survey import Member, Survey

_PAUSE_S = 65.0  # longer than a node takes
_WEIGHTS_S = 605.0
_PROFILE_S = 65.0
_PAIRS_S = 30.0
_LOOK_S = 0.1
_ANSWER_S = 10.0


class EngineCalls:
    """For one event loop."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    async def pause(self, mode: str) -> router_pb2.PauseResponse:
        """All nodes launch nothing when this returns; if it raises, those that did not before.

        Decode nodes come first: they take back what prefill nodes compute for them.

        Args:
            mode: as in PauseRequest.
        Raises:
            InvalidRequest: there is no such mode.
            WrongState: a node is not paused, or does not answer; or there is none.
        """
        request = router_pb2.PauseRequest(mode=pause_mode(mode).value)
        return await self._pause(request, self._survey.members)

    async def _pause(
        self, request: router_pb2.PauseRequest, members: Sequence[Member]
    ) -> router_pb2.PauseResponse:
        said: list[Said] = []
        for of_role in _by_role(members, "decode", "prefill"):
            said += await ask_all(of_role, "Pause", request, _PAUSE_S)
            if any(each.problem for each in said):
                fresh = [each.member for each in said if each.answer and each.answer.fresh]
                late = [each.member for each in said if each.problem]
                await self._continue([*fresh, *late])
                raise WrongState(_problems(said))
        if not said:
            raise WrongState("there is no node to pause")
        return router_pb2.PauseResponse(
            fresh=any(each.answer.fresh for each in said),
            aborted=sum(each.answer.aborted for each in said if each.member.role == "decode"),
        )

    async def resume(self) -> router_pb2.ContinueResponse:
        """
        Raises:
            WrongState: a node does not answer; the others go on.
        """
        return await self._resume(self._survey.members)

    async def _resume(self, members: Sequence[Member]) -> router_pb2.ContinueResponse:
        said: list[Said] = []
        for of_role in _by_role(members, "prefill", "decode"):
            said += await self._continue(of_role)
        _check(said)
        return router_pb2.ContinueResponse(was_paused=any(each.answer.was_paused for each in said))

    async def update_weights(self, path: str, *, abort: bool) -> router_pb2.UpdateWeightsResponse:
        """All nodes compute with the weights there when this returns. Those that were not paused
        are only while the present ones are written over.

        Args:
            abort: requests under way end; else they are computed anew from their tokens.
        Raises:
            InvalidRequest: a node refuses them, or does not answer; or they have read different
                ones. Nothing has changed.
            WrongState: a node could not be paused, and nothing has changed; or it has not changed,
                and all stay paused.
        """
        prepared, pairs = await self._prepare(path), await self._pairs()
        paused = await self.pause((PauseMode.ABORT if abort else PauseMode.RETRACT).value)
        request = node_pb2.PutWeightsRequest(id=prepared)
        said = await ask_all(self._survey.members, "PutWeights", request, _WEIGHTS_S)
        if problems := _problems(said):
            raise WrongState(f"{problems}; all nodes stay paused until this is done again")
        await self._paired(pairs)
        if paused.fresh:
            await self.resume()
        return router_pb2.UpdateWeightsResponse(id=prepared, aborted=paused.aborted)

    async def take_weights(self, lender: str, *, abort: bool) -> router_pb2.UpdateWeightsResponse:
        """All nodes compute with the weights of that one when this returns. Those with others are
        paused while they read them from it.

        Args:
            lender: its address.
            abort: as in `update_weights`.
        Raises:
            InvalidRequest: there is no such node, or it does not say what it has.
            WrongState: as in `update_weights`; those that were to take them stay paused.
        """
        has = {
            report.address: report.description.weights
            for report in await self._survey.look()
            if report.description is not None
        }
        weights, pairs = has.get(lender), await self._pairs()
        if not weights:
            raise InvalidRequest(f"node: none is known at {lender}, or it does not answer")
        others = [each for each in self._survey.members if each.address != lender]
        takers = [each for each in others if has.get(each.address) != weights]
        mode = (PauseMode.ABORT if abort else PauseMode.RETRACT).value
        paused = router_pb2.PauseResponse()
        if takers:
            paused = await self._pause(router_pb2.PauseRequest(mode=mode), takers)
        request = node_pb2.TakeWeightsRequest(id=weights, address=lender)
        said = await ask_all(others, "TakeWeights", request, _WEIGHTS_S)
        if problems := _problems(said):
            raise WrongState(f"{problems}; those that were to take them stay paused")
        await self._paired(pairs)
        if paused.fresh:
            await self._resume(takers)
        return router_pb2.UpdateWeightsResponse(id=weights, aborted=paused.aborted)

    async def _pairs(self) -> frozenset[tuple[str, str]]:
        """Each decode node with each node that it can read from."""
        return frozenset(
            (report.address, link.peer)
            for report in await self._survey.look()
            if report.role == "decode" and report.description is not None
            for link in report.description.links
        )

    async def _paired(self, pairs: frozenset[tuple[str, str]]) -> None:
        """Returns once these are again, as they are soon among nodes that have got other weights;
        after a while in any case."""
        until = time.monotonic() + _PAIRS_S
        while time.monotonic() < until:
            if pairs <= await self._pairs():
                return
            await asyncio.sleep(_LOOK_S)

    async def _prepare(self, path: str) -> WeightsId:
        request = node_pb2.PrepareWeightsRequest(path=path)
        said = await ask_all(self._survey.members, "PrepareWeights", request, _WEIGHTS_S)
        if not said:
            raise InvalidRequest("model_path: there is no node to read it")
        if problems := _problems(said):
            raise InvalidRequest(f"model_path: {problems}")
        found: set[WeightsId] = {each.answer.id for each in said}
        if len(found) > 1:
            raise InvalidRequest("model_path: nodes have read different weights there")
        return found.pop()

    async def release_memory(self, tags: Sequence[str]) -> None:
        """All nodes have given theirs back when this returns; if it raises, those that had it
        before have it again.

        Args:
            tags: as in ReleaseMemoryRequest.
        Raises:
            InvalidRequest: there is no such part of memory.
            WrongState: a node has not, or does not answer; or there is none.
        """
        request = router_pb2.ReleaseMemoryRequest(tags=memory_tags(tags))
        said = await ask_all(self._survey.members, "ReleaseMemory", request, _WEIGHTS_S)
        if not said:
            raise WrongState("there is no node that has memory")
        if problems := _problems(said):
            with suppress(WrongState):
                await self.resume_memory(tags)
            raise WrongState(problems)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """
        Args:
            tags: as in ResumeMemoryRequest.
        Raises:
            InvalidRequest: there is no such part of memory.
            WrongState: a node has not all of its memory, or does not answer; the others have.
        """
        request = router_pb2.ResumeMemoryRequest(tags=memory_tags(tags))
        _check(await ask_all(self._survey.members, "ResumeMemory", request, _WEIGHTS_S))

    async def start_profile(self, num_steps: int) -> router_pb2.ProfilesResponse:
        """
        Args:
            num_steps: as in StartProfileRequest.
        Raises:
            WrongState: a node does not; the others do.
        """
        return await self._profiled(
            "StartProfile", router_pb2.StartProfileRequest(num_steps=num_steps)
        )

    async def stop_profile(self) -> router_pb2.ProfilesResponse:
        """
        Raises:
            WrongState: of a node there is no trace; of the others there is.
        """
        return await self._profiled("StopProfile", router_pb2.StopProfileRequest())

    async def _profiled(self, method: str, request: Any) -> router_pb2.ProfilesResponse:
        said = await ask_all(self._survey.members, method, request, _PROFILE_S)
        _check(said)
        return router_pb2.ProfilesResponse(
            profiles=[
                router_pb2.Profile(
                    role=each.member.role, address=each.member.address, path=each.answer.path
                )
                for each in said
            ]
        )

    async def flush_caches(self) -> router_pb2.FlushCacheResponse:
        """
        Raises:
            WrongState: a node has requests, or does not answer; the others have done it.
        """
        request = router_pb2.FlushCacheRequest()
        said = await ask_all(self._survey.members, "FlushCache", request, _ANSWER_S)
        _check(said)
        pages_freed = sum(each.answer.pages_freed for each in said)
        return router_pb2.FlushCacheResponse(pages_freed=pages_freed)

    async def _continue(self, members: Sequence[Member]) -> list[Said]:
        return await ask_all(members, "Continue", router_pb2.ContinueRequest(), _ANSWER_S)


def _by_role(members: Sequence[Member], *roles: str) -> Sequence[Sequence[Member]]:
    return [[each for each in members if each.role == role] for role in roles]


def _check(said: Sequence[Said]) -> None:
    if any(each.problem for each in said):
        raise WrongState(_problems(said))


def _problems(said: Sequence[Said]) -> str:
    return "; ".join(each.problem for each in said if each.problem)
