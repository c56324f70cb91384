"""Release and resume of a node's memory, as requested by an operator.

    here --release--> paused, no page is held --done--> away --resume--> here

While any memory is away the node stays paused. An idle node that was not paused before continues by
itself when all of it is here again. Memory implements the release itself.
"""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import FailedPrecondition, ServingError
from common.pausing import MEMORY_TAGS, WEIGHTS
from node.commands import ReleaseMemory, ResumeMemory
from node.control.inside import ControlledRole
from node.messages import NodeCallResult


class ReleasableMemory(Protocol):
    """The memory itself. See engine/memory_release.py."""

    @property
    def unused(self) -> bool: ...

    def check(self, tags: Collection[str]) -> None: ...

    def give_back(self, tag: str) -> Future[Any]: ...

    def take_again(self, tag: str) -> Future[Any]: ...


_Step = Callable[[str], Future[Any]]  # releases or resumes the memory of a tag


@dataclass(frozen=True, slots=True)
class _UnderWay:
    number: int
    step: _Step
    tag: str
    left: tuple[str, ...]  # tags to process after it
    future: Future[Any]


class MemoryCalls:
    """Operators' calls about memory. Engine thread only."""

    def __init__(self, memory: ReleasableMemory) -> None:
        self._memory = memory
        # To be released as soon as no request has KV.
        self._wanted: tuple[int, ReleaseMemory] | None = None
        self._under_way: _UnderWay | None = None
        self._away: set[str] = set()
        self._paused_here = False

    @property
    def why_paused(self) -> str:
        """Return why the node must stay paused. Empty if it need not."""
        if self._wanted is not None or self._under_way is not None:
            return "its memory is being given back, or taken again"
        return "its memory is given back: have it taken again" if self._away else ""

    def pause(self) -> None:
        """Record an operator's pause, which only an operator ends."""
        self._paused_here = False

    @property
    def why_no_weights(self) -> str:
        """Return why weights cannot be replaced. Empty if they can."""
        busy = self._wanted is not None or self._under_way is not None
        return self.why_paused if busy or WEIGHTS in self._away else ""

    def gauges(self) -> dict[str, float]:
        return {f"away_{tag}": float(tag in self._away) for tag in MEMORY_TAGS}

    def release(self, number: int, command: ReleaseMemory, role: ControlledRole) -> None:
        """Release memory, with an answer from `done`.

        Raises:
            ServingError: that cannot begin, with the reason.
        """
        if self._wanted is not None or self._under_way is not None:
            raise FailedPrecondition(self.why_paused)
        if role.busy and not role.scheduler.paused:
            raise FailedPrecondition("requests are here: pause the node first")
        self._memory.check(command.tags)
        self._paused_here |= not role.scheduler.paused
        role.scheduler.paused = True
        self._wanted = number, command

    def resume(
        self, number: int, command: ResumeMemory, role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Resume memory, with answers like `release`. Tags that are not away are no error."""
        if self._wanted is not None or self._under_way is not None:
            raise FailedPrecondition(self.why_paused)
        away = tuple(tag for tag in command.tags if tag in self._away)
        yield from self._go_on(number, self._memory.take_again, away, role)

    def done(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the answers that are ready. Called in each turn of the loop."""
        if self._wanted is not None and role.scheduler.at_rest and role.release_kv():
            role.scheduler.clear_cache()
            if self._memory.unused:  # another node may still read exported pages
                (number, command), self._wanted = self._wanted, None
                here = tuple(tag for tag in command.tags if tag not in self._away)
                yield from self._go_on(number, self._memory.give_back, here, role)
        if self._under_way is not None and self._under_way.future.done():
            done, self._under_way = self._under_way, None
            error = done.future.exception()
            if isinstance(error, ServingError):
                yield NodeCallResult(done.number, error=str(error))
                return
            if error is not None:
                raise error
            self._away ^= {done.tag}
            yield from self._go_on(done.number, done.step, done.left, role)

    def _go_on(
        self, number: int, step: _Step, tags: tuple[str, ...], role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Process the first of these tags, or answer if there is none."""
        if tags:
            try:
                self._under_way = _UnderWay(number, step, tags[0], tags[1:], step(tags[0]))
            except ServingError as error:
                yield NodeCallResult(number, error=str(error))
            return
        if self._paused_here and not self._away:
            self._paused_here = role.scheduler.paused = False
        yield NodeCallResult(number)
