"""Profiles requested by an operator."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Protocol

from node.messages import NodeCallResult


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

    def start(self, num_steps: int) -> str:
        """Start a profile. Returns the path of its trace. Raises ServingError if it cannot."""
        return self._profiler.start(num_steps)

    def stop(self, number: int) -> None:
        """Stop the profile. `done` sends the response. Raises ServingError if no profile runs."""
        self._awaited.append((number, self._profiler.stop()))

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
