"""Profiles requested by an operator."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Protocol

from common.errors import ServingError
from node.messages import NodeCall, NodeCallResult


class ProfilerSession(Protocol):
    """The profiler. See engine/runner/profiler.py."""

    def start(self, num_steps: int) -> str: ...

    def poll(self) -> None: ...

    def stop(self) -> Future[str]: ...


class ProfileCalls:
    """Operators' calls about profiles. Engine thread only."""

    def __init__(self, profiler: ProfilerSession) -> None:
        self._profiler = profiler
        self._awaited: list[tuple[int, Future[str]]] = []  # numbers of questions

    def start(self, ask: NodeCall) -> Iterator[NodeCallResult]:
        """Start a profile. argument: number of steps."""
        try:
            yield NodeCallResult(ask.number, path=self._profiler.start(int(ask.argument)))
        except ServingError as error:
            yield NodeCallResult(ask.number, error=str(error))

    def stop(self, ask: NodeCall) -> Iterator[NodeCallResult]:
        """Stop the profile. The answer comes from here on an error, otherwise from `done`."""
        try:
            self._awaited.append((ask.number, self._profiler.stop()))
        except ServingError as error:
            yield NodeCallResult(ask.number, error=str(error))

    def done(self) -> Iterator[NodeCallResult]:
        """Yield the answers that are ready. Called in each turn of the loop."""
        self._profiler.poll()
        for number, written in [each for each in self._awaited if each[1].done()]:
            self._awaited.remove((number, written))
            error = written.exception()
            if error is None:
                yield NodeCallResult(number, path=written.result())
            else:
                yield NodeCallResult(number, error=str(error))
