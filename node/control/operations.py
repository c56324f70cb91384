"""Operators' commands to an engine, answered when they are done."""

from collections.abc import Iterator

from common.requests.weights import WeightsId
from node.control.inside import ControlledRole
from node.control.memory_calls import MemoryCalls, ReleasableMemory
from node.control.pauses import Pauses
from node.control.profile_calls import ProfileCalls, ProfilerSession
from node.control.weight_calls import UpdatableWeights, WeightCalls, WeightSources
from node.messages import NodeCall, NodeCallResult


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

    def take(self, ask: NodeCall, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Carry out a command. Yields immediate answers. `done` yields the others."""
        match ask.what:
            case "pause":
                self._memory.pause()
                self._pauses.begin(ask, role)
            case "continue" if reason := self._memory.why_paused or self._weights.why_paused:
                yield NodeCallResult(ask.number, error=reason)
            case "continue":
                yield from self._pauses.resume(ask, role)
            case "prepare_weights":
                yield from self._weights.prepare(ask)
            case "put_weights" | "take_weights" if reason := self._memory.why_no_weights:
                yield NodeCallResult(ask.number, error=reason)
            case "put_weights":
                yield from self._weights.put(ask, role)
            case "take_weights":
                yield from self._weights.take(ask, role)
            case "release_memory" if reason := self._weights.why_busy:
                yield NodeCallResult(ask.number, error=reason)
            case "release_memory":
                yield from self._memory.release(ask, role)
            case "resume_memory":
                yield from self._memory.resume(ask, role)
            case "start_profile":
                yield from self._profiles.start(ask)
            case "stop_profile":
                yield from self._profiles.stop(ask)
            case unknown:
                yield NodeCallResult(ask.number, error=f"unknown question {unknown!r}")

    def done(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the answers that are ready. Called in each turn of the loop."""
        yield from self._pauses.reached(role)
        yield from self._weights.done(role)
        yield from self._memory.done(role)
        yield from self._profiles.done()
