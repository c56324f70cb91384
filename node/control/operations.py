"""Operators' commands to an engine, answered when they are done."""

from collections.abc import Iterator

from common.errors import FailedPrecondition
from common.requests.namespace import WeightsId
from node.commands import (
    Command,
    ContinueGeneration,
    PauseGeneration,
    PrepareWeights,
    PutWeights,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    TakeWeights,
)
from node.control.inside import ControlledRole
from node.control.memory_calls import MemoryCalls, ReleasableMemory
from node.control.pauses import Pauses
from node.control.profile_calls import ProfileCalls, ProfilerSession
from node.control.weight_calls import UpdatableWeights, WeightCalls, WeightSources
from node.messages import NodeCallResult


class EngineOperations:
    """All commands by kind. Engine thread only."""

    def __init__(
        self,
        weights: UpdatableWeights,
        lenders: WeightSources,
        memory: ReleasableMemory,
        profiler: ProfilerSession,
    ) -> None:
        self._pauses = Pauses()
        self._weights = WeightCalls(weights, lenders)
        self._memory = MemoryCalls(memory)
        self._profiles = ProfileCalls(profiler)

    @property
    def weights(self) -> WeightsId:
        """Return the weight version in use."""
        return self._weights.id

    def counters(self) -> dict[str, int]:
        return {**self._pauses.counters(), **self._weights.counters()}

    def gauges(self) -> dict[str, float]:
        return self._memory.gauges()

    def begin(
        self, number: int, command: Command, role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Carry out a command. Yields immediate answers. `done` yields the others.

        Raises:
            ServingError: it is not possible now, with the reason.
        """
        match command:
            case PauseGeneration(mode):
                self._memory.pause()
                self._pauses.begin(number, mode, role)
            case ContinueGeneration():
                _require_none(self._memory.why_paused or self._weights.why_paused)
                yield from self._pauses.resume(number, role)
            case PrepareWeights(path):
                self._weights.prepare(number, path)
            case PutWeights() | TakeWeights():
                _require_none(self._memory.why_no_weights)
                yield from self._weights.begin(number, command, role)
            case ReleaseMemory():
                _require_none(self._weights.why_busy)
                self._memory.release(number, command, role)
            case ResumeMemory():
                yield from self._memory.resume(number, command, role)
            case StartProfile(num_steps):
                yield NodeCallResult(number, path=self._profiles.start(num_steps))
            case StopProfile():
                self._profiles.stop(number)

    def done(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the answers that are ready. Called in each turn of the loop."""
        yield from self._pauses.reached(role)
        yield from self._weights.done(role)
        yield from self._memory.done(role)
        yield from self._profiles.done()


def _require_none(obstacle: str) -> None:
    """Raise FailedPrecondition if there is an obstacle."""
    if obstacle:
        raise FailedPrecondition(obstacle)
