"""What operators ask of the engines of all nodes at once: pauses, and empty caches."""

from collections.abc import Sequence

from common.errors import WrongState
from common.pause_mode import pause_mode
from protos import router_pb2
from router.cluster.fan_out import Said, ask_all
from router.cluster.survey import Member, Survey

_PAUSE_S = 65.0  # longer than a node takes
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
        said: list[Said] = []
        for members in self._by_role("decode", "prefill"):
            said += await ask_all(members, "Pause", request, _PAUSE_S)
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
        said: list[Said] = []
        for members in self._by_role("prefill", "decode"):
            said += await self._continue(members)
        _check(said)
        return router_pb2.ContinueResponse(was_paused=any(each.answer.was_paused for each in said))

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

    def _by_role(self, *roles: str) -> Sequence[Sequence[Member]]:
        members = self._survey.members
        return [[each for each in members if each.role == role] for role in roles]


def _check(said: Sequence[Said]) -> None:
    if any(each.problem for each in said):
        raise WrongState(_problems(said))


def _problems(said: Sequence[Said]) -> str:
    return "; ".join(each.problem for each in said if each.problem)
