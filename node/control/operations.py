"""Commands of operators to an engine about weights, memory and profiles. Used by EngineControl."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from common.errors import FailedPrecondition, ServingError
from common.pausing import KV_CACHE, MEMORY_TAGS, WEIGHTS
from common.requests.namespace import UNNAMED, WeightsId
from engine.memory_release import MemoryOccupation
from engine.profiler import Profiler
from engine.update import WeightUpdater
from node.control.pauses import ControlledRole, Pauses
from node.messages import (
    Command,
    ContinueGeneration,
    NodeCallResult,
    PauseGeneration,
    PrepareWeights,
    PutWeights,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    TakeWeights,
)
from node.sharing.weights import WeightSharing


class ProfileCalls:
    """Calls about profiles. Engine thread only."""

    def __init__(self, profiler: Profiler) -> None:
        self._profiler = profiler
        self._awaited: list[tuple[int, Future[str]]] = []  # numbers of calls

    def start(self, num_steps: int) -> str:
        """Start a profile. Returns the path of its trace. Raises ServingError if that fails."""
        return self._profiler.start(num_steps)

    def stop(self, number: int) -> None:
        """Stop the profile. `done` yields the response. Raises ServingError if no profile runs."""
        self._awaited.append((number, self._profiler.stop()))

    @property
    def busy(self) -> bool:
        return bool(self._awaited) or self._profiler.is_running

    def done(self) -> Iterator[NodeCallResult]:
        """Yield the responses that are ready."""
        self._profiler.poll()
        for number, written in [each for each in self._awaited if each[1].done()]:
            self._awaited.remove((number, written))
            error = written.exception()
            if error is None:
                yield NodeCallResult(number, path=written.result())
            else:
                yield NodeCallResult(number, error=str(error))


# Release and resume of a node's memory on request of an operator.
#
#     here --release--> paused, no page is held --isolated, none is held--> away --resume--> here
#
# While any memory is released, the node stays paused. When all is resumed, an idle node that no
# operator paused continues by itself. MemoryOccupation implements the release. Only pages in GPU
# memory are isolated from other nodes, which may open reads until then.
_Step = Callable[[str], Future[Any]]  # releases or resumes the memory of a tag


@dataclass(frozen=True, slots=True)
class _UnderWay:
    number: int
    step: _Step
    tag: str
    left: tuple[str, ...]  # tags to process after this one
    future: Future[Any]


class MemoryCalls:
    """Calls about memory. Engine thread only."""

    def __init__(self, memory: MemoryOccupation) -> None:
        self._memory = memory
        # The release to start as soon as no request has KV.
        self._wanted: tuple[int, ReleaseMemory] | None = None
        self._isolating: Future[None] | None = None
        self._isolated = False  # from isolation until the release begins
        self._under_way: _UnderWay | None = None
        self._away: set[str] = set()
        self._paused_here = False

    @property
    def busy(self) -> bool:
        return self._wanted is not None or self._under_way is not None

    @property
    def why_paused(self) -> str:
        """Return why the node must stay paused, or ""."""
        if self.busy:
            return "its memory is being released or allocated"
        return "its memory is released: allocate it again first" if self._away else ""

    def pause(self) -> None:
        """Record an operator's pause, which only an operator ends."""
        self._paused_here = False

    @property
    def why_no_weights(self) -> str:
        """Return why weights cannot be replaced, or ""."""
        return self.why_paused if self.busy or WEIGHTS in self._away else ""

    @property
    def why_no_reads(self) -> str:
        """Return why this node cannot read pages of other nodes, or ""."""
        if KV_CACHE in self._away and self._memory.isolates:
            return f"{KV_CACHE}: its memory is released, and reads need pages: allocate it first"
        return ""

    def gauges(self) -> dict[str, float]:
        return {f"away_{tag}": float(tag in self._away) for tag in MEMORY_TAGS}

    def release(self, number: int, command: ReleaseMemory, role: ControlledRole) -> None:
        """Release memory. `done` yields the response.

        Raises:
            ServingError: the release cannot begin, for the reason in the message.
        """
        if self.busy:
            raise FailedPrecondition(self.why_paused)
        if role.busy and not role.scheduler.paused:
            raise FailedPrecondition("this node has requests: pause it first")
        self._memory.check(command.tags)
        self._paused_here |= not role.scheduler.paused
        role.scheduler.paused = True
        self._wanted = number, command

    def resume(
        self, number: int, command: ResumeMemory, role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Resume memory. `done` yields the response. Tags that are not released are ignored."""
        if self.busy:
            raise FailedPrecondition(self.why_paused)
        away = tuple(tag for tag in command.tags if tag in self._away)
        yield from self._continue(number, self._memory.take_again, away, role)

    def done(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the responses that are ready."""
        if self._wanted is not None and role.scheduler.at_rest and role.release_kv():
            role.scheduler.clear_cache()
            yield from self._begin_release(*self._wanted, role)
        if self._under_way is not None and self._under_way.future.done():
            done, self._under_way = self._under_way, None
            error = done.future.exception()
            if isinstance(error, ServingError):
                yield NodeCallResult(done.number, error=str(error))
                return
            if error is not None:
                raise error
            self._away ^= {done.tag}
            yield from self._continue(done.number, done.step, done.left, role)

    def _begin_release(
        self, number: int, command: ReleaseMemory, role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Begin the release if no page is used, by this node or another."""
        here = tuple(tag for tag in command.tags if tag not in self._away)
        if not self._memory.unused:  # another node may still read exported pages
            return
        if KV_CACHE in here and self._memory.isolates and not self._isolated:
            if self._isolating is None:
                self._isolating = self._memory.isolate()
            elif self._isolating.done():
                error, self._isolating = self._isolating.exception(), None
                if isinstance(error, FailedPrecondition):
                    self._wanted = None
                    self._end_pause(role)
                    yield NodeCallResult(number, error=f"{KV_CACHE}: {error}")
                elif error is not None:
                    raise error
                # Requests for pages that came before are handled by the role until the next turn.
                self._isolated = error is None
            return
        self._wanted, self._isolated = None, False
        yield from self._continue(number, self._memory.give_back, here, role)

    def _continue(
        self, number: int, step: _Step, tags: tuple[str, ...], role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Process the first of these tags. If none is left, send the response."""
        if tags:
            try:
                self._under_way = _UnderWay(number, step, tags[0], tags[1:], step(tags[0]))
            except ServingError as error:
                yield NodeCallResult(number, error=str(error))
            return
        self._end_pause(role)
        yield NodeCallResult(number)

    def _end_pause(self, role: ControlledRole) -> None:
        """End the pause if the node was paused only for a release, and all memory is back."""
        if self._paused_here and not self._away:
            self._paused_here = role.scheduler.paused = False


# Replacement of weights on request of an operator.
#
# The new weights are checked first. That takes as long as reading them and delays no request. They
# are put in place during a pause that has released all KV. Weights of another node are also read
# during that pause:
#
#     wanted --at rest, no KV--> reading (from a node) --complete and correct--> putting --> done
#
# WeightUpdater and WeightSharing implement the access to files, tensors and other nodes.
@dataclass(frozen=True, slots=True)
class _Asked:
    number: int
    weights: WeightsId
    future: Future[Any]


class WeightCalls:
    """Calls about weights. Engine thread only."""

    def __init__(self, weights: WeightUpdater, sharing: WeightSharing) -> None:
        self._weights = weights
        self._sharing = sharing
        self._preparing: list[_Asked] = []
        # The weights to put in place as soon as no request has KV.
        self._wanted: tuple[int, PutWeights | TakeWeights] | None = None
        self._reading: _Asked | None = None
        self._putting: _Asked | None = None
        # The versions that the role has been given.
        self._computed_with = self._paired_as = weights.id
        self._num_updates = 0

    def counters(self) -> dict[str, int]:
        return {"weight_updates": self._num_updates}

    @property
    def busy(self) -> bool:
        return bool(self._preparing or self.why_busy)

    @property
    def why_busy(self) -> str:
        """Return why no other change of weights may start, or ""."""
        steps = (self._wanted, self._reading, self._putting)
        return "its weights are being changed" if any(steps) else ""

    @property
    def why_paused(self) -> str:
        """Return why the node must stay paused, or ""."""
        return self.why_busy or ("" if self._weights.whole else "its weights are incomplete")

    def prepare(self, number: int, path: str) -> None:
        """Check weights. `done` yields the response. Raises ServingError if it cannot begin."""
        self._preparing.append(_Asked(number, UNNAMED, self._weights.prepare(path)))

    def begin(
        self, number: int, command: PutWeights | TakeWeights, role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Put prepared weights in place, or for TakeWeights the weights of another node. `done`
        yields the response, unless these weights are already in use.

        Raises:
            FailedPrecondition: the change cannot begin now.
        """
        has_them = command.weights == self._weights.id and self._weights.whole
        if isinstance(command, TakeWeights) and has_them and not self.why_busy:
            yield NodeCallResult(number, weights=command.weights)
        elif not role.scheduler.paused:
            raise FailedPrecondition("this node is not paused")
        elif self.why_busy:
            raise FailedPrecondition("its weights are being changed already")
        else:
            self._wanted = number, command

    def done(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the responses that are ready."""
        for asked in [each for each in self._preparing if each.future.done()]:
            self._preparing.remove(asked)
            yield _answer(asked)
        if self._wanted is not None and role.scheduler.at_rest and role.release_kv():
            (number, command), self._wanted = self._wanted, None
            role.scheduler.clear_cache()
            if isinstance(command, TakeWeights):
                self._read(number, command, role)
            else:
                yield from self._put(number, command.weights)
        if self._reading is not None and self._reading.future.done():
            asked, self._reading = self._reading, None
            if asked.future.exception() is None:
                yield from self._put(asked.number, asked.weights)
            else:
                yield _answer(asked)
        if self._putting is not None and self._putting.future.done():
            asked, self._putting = self._putting, None
            self._num_updates += asked.future.exception() is None
            yield _answer(asked)
        if self._weights.id != self._computed_with:
            self._computed_with = self._weights.id
            role.update_waiting_requests()
        if not self.why_busy:
            self._pair_as(self._weights.id, role)

    def _read(self, number: int, command: TakeWeights, role: ControlledRole) -> None:
        """Start to read weights from another node. That node pairs only with nodes of the same
        version, so this node announces that version until the read ends. Meanwhile it computes
        nothing and has no KV.
        """
        weights = command.weights
        self._pair_as(weights, role)
        self._reading = _Asked(number, weights, self._sharing.read(weights, command.address))

    def _put(self, number: int, weights: WeightsId) -> Iterator[NodeCallResult]:
        try:
            self._putting = _Asked(number, weights, self._weights.put(weights))
        except ServingError as error:
            yield NodeCallResult(number, error=str(error))

    def _pair_as(self, weights: WeightsId, role: ControlledRole) -> None:
        if weights != self._paired_as:
            self._paired_as = weights
            role.set_weight_version(weights)


def _answer(asked: _Asked) -> NodeCallResult:
    error = asked.future.exception()
    if error is None:
        return NodeCallResult(asked.number, weights=asked.future.result() or asked.weights)
    if not isinstance(error, ServingError):
        raise error
    return NodeCallResult(asked.number, error=str(error))


class EngineOperations:
    """All commands of operators, by kind. Engine thread only.

    Args:
        why_fixed: why weights and memory cannot be changed. "": they can.
    """

    def __init__(
        self,
        weights: WeightUpdater,
        sharing: WeightSharing,
        memory: MemoryOccupation,
        profiler: Profiler,
        why_fixed: str = "",
    ) -> None:
        self._why_fixed = why_fixed
        self._updater = weights
        self._sharing = sharing
        self._pending = False  # whether a response may be due
        self._pauses = Pauses()
        self._weights = WeightCalls(weights, sharing)
        self._memory = MemoryCalls(memory)
        self._profiles = ProfileCalls(profiler)

    @property
    def weights(self) -> WeightsId:
        """Current weight version."""
        return self._updater.id

    def check_complete(self) -> None:
        """Raise FailedPrecondition if memory is released, or weights are incomplete."""
        _require_none(self._memory.why_paused or self._weights.why_paused)

    def counters(self) -> dict[str, int]:
        return {**self._pauses.counters(), **self._weights.counters()}

    def gauges(self) -> dict[str, float]:
        return self._memory.gauges()

    def begin(
        self, number: int, command: Command, role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Carry out a command. Yields an immediate response. `done` yields later ones.

        Raises:
            ServingError: the command is not possible now, for the reason in the message.
        """
        self._pending = True
        match command:
            case PauseGeneration(mode):
                self._memory.pause()
                self._pauses.begin(number, mode, role)
            case ContinueGeneration():
                self.check_complete()
                yield from self._pauses.resume(number, role)
            case PrepareWeights(path):
                _require_none(self._why_fixed)
                self._weights.prepare(number, path)
            case PutWeights() | TakeWeights():
                _require_none(self._why_fixed or self._memory.why_no_weights)
                if isinstance(command, TakeWeights):
                    _require_none(self._memory.why_no_reads)
                yield from self._weights.begin(number, command, role)
            case ReleaseMemory():
                _require_none(self._why_fixed or self._weights.why_busy)
                self._memory.release(number, command, role)
            case ResumeMemory():
                yield from self._memory.resume(number, command, role)
            case StartProfile(num_steps):
                yield NodeCallResult(number, path=self._profiles.start(num_steps))
            case StopProfile():
                self._profiles.stop(number)

    def done(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the responses that are ready. Called in each turn of the engine loop."""
        if self._sharing.due:
            self._sharing.poll()
        if not self._pending:
            return
        yield from self._pauses.reached(role)
        yield from self._weights.done(role)
        yield from self._memory.done(role)
        yield from self._profiles.done()
        parts = self._pauses, self._weights, self._memory, self._profiles
        self._pending = any(part.busy for part in parts)


def _require_none(obstacle: str) -> None:
    """Raise FailedPrecondition unless `obstacle` is ""."""
    if obstacle:
        raise FailedPrecondition(obstacle)
