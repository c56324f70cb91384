"""Commands of operators to an engine about weights, memory and profiles. Used by EngineControl."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from common.errors import FailedPrecondition, ServingError
from common.pausing import KV_CACHE, MEMORY_TAGS, WEIGHTS
from common.requests.namespace import WeightsId
from engine.memory_release import MemoryOccupation
from engine.profiler import Profiler
from engine.update import WeightUpdater
from node.control.commands import CommandSteps, ControlledRole, Pauses, awaited
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


def _is_emptied(role: ControlledRole) -> bool:
    """Return whether no request has KV. Then the prefix cache is emptied too."""
    if not (role.scheduler.at_rest and role.release_kv()):
        return False
    role.scheduler.clear_cache()
    return True


class MemoryCommands:
    """Release and resume of a node's memory on request of an operator. Engine thread only.

        here --release--> paused, no page is held --isolated, none is held--> away --resume--> here

    While any memory is released, the node stays paused. When all is resumed, an idle node that no
    operator paused continues by itself. MemoryOccupation implements the release. Only pages in GPU
    memory are isolated from other nodes, which may open reads until then.

    Args:
        gauges: report of the node, which gets the state of each part of the memory.
    """

    def __init__(self, memory: MemoryOccupation, gauges: dict[str, float]) -> None:
        self._memory = memory
        self._gauges = gauges
        self._away: set[str] = set()
        self._under_way = False
        self._paused_here = False
        self._gauges |= {f"away_{tag}": 0.0 for tag in MEMORY_TAGS}

    @property
    def why_paused(self) -> str:
        """Return why the node must stay paused, or ""."""
        if self._under_way:
            return "its memory is being released or allocated"
        return "its memory is released: allocate it again first" if self._away else ""

    @property
    def why_no_weights(self) -> str:
        """Return why weights cannot be replaced, or ""."""
        return self.why_paused if self._under_way or WEIGHTS in self._away else ""

    @property
    def why_no_reads(self) -> str:
        """Return why this node cannot read pages of other nodes, or ""."""
        if KV_CACHE in self._away and self._memory.isolates:
            return f"{KV_CACHE}: its memory is released, and reads need pages: allocate it first"
        return ""

    def note_pause(self) -> None:
        """Record an operator's pause, which only an operator ends."""
        self._paused_here = False

    def release(self, tags: tuple[str, ...], role: ControlledRole) -> CommandSteps:
        """Release memory as soon as no page is used, by this node or another."""
        with self._alone():
            if role.busy and not role.scheduler.paused:
                raise FailedPrecondition("this node has requests: pause it first")
            self._memory.check(tags)
            self._paused_here |= not role.scheduler.paused
            role.scheduler.paused = True
            try:
                yield None
                yield from self._released([tag for tag in tags if tag not in self._away], role)
            finally:
                self._end_pause(role)
        yield NodeCallResult()

    def _released(self, tags: Sequence[str], role: ControlledRole) -> Iterator[None]:
        yield from self._until_unused(role)
        if KV_CACHE in tags and self._memory.isolates:
            yield from self._isolated()
            yield None  # the role handles requests for pages that came before
            yield from self._until_unused(role)
        for tag in tags:
            yield from awaited(self._memory.release(tag))
            self._set_away(tag, away=True)

    def resume(self, tags: tuple[str, ...], role: ControlledRole) -> CommandSteps:
        """Allocate memory again. Tags that are not released are ignored."""
        with self._alone():
            for tag in [tag for tag in tags if tag in self._away]:
                yield from awaited(self._memory.restore(tag))
                self._set_away(tag, away=False)
        self._end_pause(role)
        yield NodeCallResult()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse other changes of memory inside the context."""
        if self._under_way:
            raise FailedPrecondition(self.why_paused)
        self._under_way = True
        try:
            yield
        finally:
            self._under_way = False

    def _until_unused(self, role: ControlledRole) -> Iterator[None]:
        """Wait until no page is used. Other nodes may still read exported pages."""
        while not (_is_emptied(role) and self._memory.unused):
            yield None

    def _isolated(self) -> Iterator[None]:
        try:
            yield from awaited(self._memory.isolate())
        except FailedPrecondition as error:
            raise FailedPrecondition(f"{KV_CACHE}: {error}") from error

    def _set_away(self, tag: str, *, away: bool) -> None:
        self._gauges[f"away_{tag}"] = float(away)
        self._away ^= {tag}

    def _end_pause(self, role: ControlledRole) -> None:
        """End the pause if the node was paused only for a release, and all memory is back."""
        if self._paused_here and not self._away:
            self._paused_here = role.scheduler.paused = False


class WeightCommands:
    """Replacement of weights on request of an operator. Engine thread only.

    The new weights are checked first, which takes as long as reading them and delays no request.
    They are put in place during a pause that has released all KV. Weights of another node are also
    read during that pause. WeightUpdater and WeightSharing implement the access to files, tensors
    and other nodes.

    Args:
        gauges: report of the node, which gets the number of updates.
    """

    def __init__(
        self, weights: WeightUpdater, sharing: WeightSharing, gauges: dict[str, float]
    ) -> None:
        self._weights = weights
        self._sharing = sharing
        self._gauges = gauges
        self._under_way = False
        # The versions that the role computes with, and that it pairs as.
        self._computed_with = self._paired_as = weights.id
        self._gauges["total_weight_updates"] = 0.0

    @property
    def why_busy(self) -> str:
        """Return why no other change of weights may start, or ""."""
        return "its weights are being changed" if self._under_way else ""

    @property
    def why_paused(self) -> str:
        """Return why the node must stay paused, or ""."""
        return self.why_busy or ("" if self._weights.whole else "its weights are incomplete")

    def prepare(self, path: str) -> CommandSteps:
        weights = yield from awaited(self._weights.prepare(path))
        yield NodeCallResult(weights=weights)

    def replace(self, command: PutWeights | TakeWeights, role: ControlledRole) -> CommandSteps:
        """Put prepared weights in place, or for TakeWeights the weights of another node, unless
        these are already in use.
        """
        has_them = command.weights == self._weights.id and self._weights.whole
        if isinstance(command, TakeWeights) and has_them and not self._under_way:
            yield NodeCallResult(weights=command.weights)
            return
        if not role.scheduler.paused:
            raise FailedPrecondition("this node is not paused")
        if self._under_way:
            raise FailedPrecondition("its weights are being changed already")
        self._under_way = True
        try:
            yield from self._put(command, role)
        except ServingError:
            self._end(role)
            raise
        self._gauges["total_weight_updates"] += 1
        self._end(role)
        yield NodeCallResult(weights=command.weights)

    def _put(
        self, command: PutWeights | TakeWeights, role: ControlledRole
    ) -> Generator[None, None, None]:
        while not _is_emptied(role):
            yield None
        if isinstance(command, TakeWeights):
            # That node pairs only with nodes of the same version, so this node announces it until
            # the read ends. Meanwhile it computes nothing and has no KV.
            self._pair_as(command.weights, role)
            yield from self._sharing.reads.read(command.weights, command.address)
        yield from awaited(self._weights.put(command.weights))

    def _end(self, role: ControlledRole) -> None:
        """Make the role use the weights that are in place now."""
        self._under_way = False
        if self._weights.id != self._computed_with:
            self._computed_with = self._weights.id
            role.update_waiting_requests()
        self._pair_as(self._weights.id, role)

    def _pair_as(self, weights: WeightsId, role: ControlledRole) -> None:
        if weights != self._paired_as:
            self._paired_as = weights
            role.set_weight_version(weights)


class EngineOperations:
    """All commands of operators, by kind. Engine thread only.

    Args:
        why_fixed: why weights and memory cannot be changed. "": they can.
    Attributes:
        gauges: state and totals of all commands, named as in EngineStats.
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
        self._profiler = profiler
        self._updater = weights
        self.gauges = sharing.gauges
        self._pauses = Pauses(self.gauges)
        self._weights = WeightCommands(weights, sharing, self.gauges)
        self._memory = MemoryCommands(memory, self.gauges)

    @property
    def weights_in_use(self) -> WeightsId:
        return self._updater.id

    def check_complete(self) -> None:
        """Raise FailedPrecondition if memory is released, or weights are incomplete."""
        _require_none(self._memory.why_paused or self._weights.why_paused)

    def steps(self, command: Command, role: ControlledRole) -> CommandSteps:
        """Carry out a command. Raises ServingError if it is not possible now."""
        match command:
            case PauseGeneration(mode):
                self._memory.note_pause()
                yield from self._pauses.pause(mode, role)
            case ContinueGeneration():
                self.check_complete()
                yield from self._pauses.resume(role)
            case PrepareWeights(path):
                _require_none(self._why_fixed)
                yield from self._weights.prepare(path)
            case PutWeights() | TakeWeights():
                _require_none(self._why_fixed or self._memory.why_no_weights)
                if isinstance(command, TakeWeights):
                    _require_none(self._memory.why_no_reads)
                yield from self._weights.replace(command, role)
            case ReleaseMemory(tags):
                _require_none(self._why_fixed or self._weights.why_busy)
                yield from self._memory.release(tags, role)
            case ResumeMemory(tags):
                yield from self._memory.resume(tags, role)
            case StartProfile(num_steps):
                yield NodeCallResult(path=self._profiler.start(num_steps))
                while self._profiler.is_running:
                    self._profiler.poll()
                    yield None
            case StopProfile():
                written = self._profiler.stop()
                while not written.done():
                    yield None
                if (error := written.exception()) is not None:
                    raise FailedPrecondition(str(error))
                yield NodeCallResult(path=written.result())


def _require_none(obstacle: str) -> None:
    """Raise FailedPrecondition unless `obstacle` is ""."""
    if obstacle:
        raise FailedPrecondition(obstacle)
