"""Release and resume of a node's memory, as requested by an operator.

    here --release--> paused, no page is held --done--> away --resume--> here

While any memory is away the node stays paused. An idle node that was not paused before continues by
itself when all of it is here again. Memory implements the release itself.
"""

from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import ServingError
from common.memory_tags import MEMORY_TAGS, WEIGHTS
from node.control.inside import ControlledRole
from node.messages import NodeCall, NodeCallResult


class ReleasableMemory(Protocol):
    """The memory itself. See engine/memory_release.py."""

    @property
    def unused(self) -> bool: ...

    def check(self, tags: Collection[str]) -> None: ...

    def give_back(self, tag: str) -> Future[Any]: ...

    def take_again(self, tag: str) -> Future[Any]: ...


@dataclass(frozen=True, slots=True)
class _UnderWay:
    ask: NodeCall
    tag: str
    left: tuple[str, ...]  # tags to process after it
    future: Future[Any]


class MemoryCalls:
    """Operators' calls about memory. Engine thread only."""

    def __init__(self, memory: ReleasableMemory) -> None:
        self._memory = memory
        self._wanted: NodeCall | None = None  # to be released as soon as no request has KV
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

    def release(self, ask: NodeCall, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Release memory. The answer comes from here on an error, otherwise from `done`. argument:
        tags, separated by commas.
        """
        if (reason := self._why_not(role)) is not None:
            yield NodeCallResult(ask.number, error=reason)
            return
        try:
            self._memory.check(_tags(ask))
        except ServingError as error:
            yield NodeCallResult(ask.number, error=str(error))
            return
        self._paused_here |= not role.scheduler.paused
        role.scheduler.paused = True
        self._wanted = ask

    def resume(self, ask: NodeCall, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Resume memory, with answers like `release`. Tags that are not away are no error."""
        if self._wanted is not None or self._under_way is not None:
            yield NodeCallResult(ask.number, error=self.why_paused)
        else:
            yield from self._go_on(ask, tuple(tag for tag in _tags(ask) if tag in self._away), role)

    def done(self, role: ControlledRole) -> Iterator[NodeCallResult]:
        """Yield the answers that are ready. Called in each turn of the loop."""
        if self._wanted is not None and role.scheduler.at_rest and role.release_kv():
            role.scheduler.clear_cache()
            if self._memory.unused:  # another node may still read exported pages
                ask, self._wanted = self._wanted, None
                here = tuple(tag for tag in _tags(ask) if tag not in self._away)
                yield from self._go_on(ask, here, role)
        if self._under_way is not None and self._under_way.future.done():
            done, self._under_way = self._under_way, None
            error = done.future.exception()
            if isinstance(error, ServingError):
                yield NodeCallResult(done.ask.number, error=str(error))
                return
            if error is not None:
                raise error
            self._away ^= {done.tag}
            yield from self._go_on(done.ask, done.left, role)

    def _why_not(self, role: ControlledRole) -> str | None:
        if self._wanted is not None or self._under_way is not None:
            return self.why_paused
        if role.busy and not role.scheduler.paused:
            return "requests are here: pause the node first"
        return None

    def _go_on(
        self, ask: NodeCall, tags: tuple[str, ...], role: ControlledRole
    ) -> Iterator[NodeCallResult]:
        """Process the first of these tags, or answer if there is none."""
        if tags:
            begin = self._memory.give_back if _gives(ask) else self._memory.take_again
            try:
                self._under_way = _UnderWay(ask, tags[0], tags[1:], begin(tags[0]))
            except ServingError as error:
                yield NodeCallResult(ask.number, error=str(error))
            return
        if self._paused_here and not self._away:
            self._paused_here = role.scheduler.paused = False
        yield NodeCallResult(ask.number)


def _tags(ask: NodeCall) -> tuple[str, ...]:
    return tuple(ask.argument.split(","))


def _gives(ask: NodeCall) -> bool:
    return ask.what == "release_memory"
