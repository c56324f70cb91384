"""Requests whose guide is being compiled: they hold nothing, and nobody waits for them."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.engine.features.guides import Compiled, Guides
from common.engine.rows.request import Request
from common.errors import ServingError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[T]):
    request: Request
    beside: T
    grammar: Future[Compiled]


class Guided(Generic[T]):
    """Engine thread only."""

    def __init__(self, guides: Guides) -> None:
        self._guides = guides
        self._waiting: dict[int, _Waiting[T]] = {}  # by request key

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: Request, beside: T) -> None:
        """A request with a guide, and what its owner wants back with it.

        Raises:
            Overloaded: too many guides wait.
        """
        guide = request.sampling.guide
        assert guide is not None
        grammar = self._guides.compiled(guide)
        self._waiting[request.key] = _Waiting(request, beside, grammar)

    def remove(self, request: Request) -> bool:
        return self._waiting.pop(request.key, None) is not None

    def requests(self) -> list[Request]:
        return [waiting.request for waiting in self._waiting.values()]

    def done(self) -> Iterator[tuple[Request, T, ServingError | None]]:
        """Those whose guide is compiled, which they have now, or is none, and why. Takes them."""
        for key, waiting in list(self._waiting.items()):
            if not waiting.grammar.done():
                continue
            del self._waiting[key]
            error = waiting.grammar.exception()
            if error is None:
                waiting.request.compiled = waiting.grammar.result()
            elif not isinstance(error, ServingError):
                raise error
            yield waiting.request, waiting.beside, error
