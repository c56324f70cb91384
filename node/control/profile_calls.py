"""Profiles, as an operator asks for them."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Protocol

from common.errors import ServingError
from node.messages import Answer, Ask


class Profiling(Protocol):
    """See engine/runner/profiler.py."""

    def start(self, num_steps: int) -> str: ...

    def poll(self) -> None: ...

    def stop(self) -> Future[str]: ...


class ProfileCalls:
    """Engine thread only."""

    def __init__(self, profiler: Profiling) -> None:
        self._profiler = profiler
        self._awaited: list[tuple[int, Future[str]]] = []  # numbers of questions

    def start(self, ask: Ask) -> Iterator[Answer]:
        """argument: steps."""
        try:
            yield Answer(ask.number, path=self._profiler.start(int(ask.argument)))
        except ServingError as error:
            yield Answer(ask.number, error=str(error))

    def stop(self, ask: Ask) -> Iterator[Answer]:
        """`done` gives the answer, or this does."""
        try:
            self._awaited.append((ask.number, self._profiler.stop()))
        except ServingError as error:
            yield Answer(ask.number, error=str(error))

    def done(self) -> Iterator[Answer]:
        """To be called in each turn."""
        self._profiler.poll()
        for number, written in [each for each in self._awaited if each[1].done()]:
            self._awaited.remove((number, written))
            error = written.exception()
            if error is None:
                yield Answer(number, path=written.result())
            else:
                yield Answer(number, error=str(error))
