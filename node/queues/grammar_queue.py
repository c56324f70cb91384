"""Requests whose guide is being compiled or whose first mask is being made. They hold nothing, and
no other request waits for them.
"""

from collections.abc import Iterator
from concurrent.futures import Future

from common.errors import InvalidRequest, ServingError
from engine.batch.request import Request
from engine.grammar.guides import GrammarCache
from engine.grammar.matching import CompiledGuide


class GrammarQueue:
    """The queue for guide compilation. Engine thread only."""

    name = "grammar"

    def __init__(self, guides: GrammarCache) -> None:
        self._guides = guides
        self._waiting: dict[int, tuple[Request, Future[CompiledGuide]]] = {}  # by key

    def __len__(self) -> int:
        return len(self._waiting)

    def needed_by(self, request: Request) -> bool:
        return request.sampling.guide is not None

    def put(self, request: Request) -> None:
        """Add a request with a guide.

        Raises:
            Overloaded: too many guides wait.
        """
        guide = request.sampling.guide
        assert guide is not None
        self._waiting[request.key] = request, self._guides.compiled(guide)

    def remove(self, request: Request) -> bool:
        return self._waiting.pop(request.key, None) is not None

    def ready(self, now: float) -> Iterator[tuple[Request, ServingError | None]]:
        """Yield and remove the requests that have their `match` now, or cannot have one, with the
        reason.
        """
        for key, (request, compiled) in list(self._waiting.items()):
            if not compiled.done():
                continue
            error = compiled.exception() or self._error_of_match(request, compiled.result())
            if error is None and (request.match is None or not request.match.ready):
                continue
            del self._waiting[key]
            if error is not None and not isinstance(error, ServingError):
                raise error
            yield request, error

    def _error_of_match(self, request: Request, compiled: CompiledGuide) -> InvalidRequest | None:
        """Start the request's match, or poll it."""
        match = request.match
        if match is None:
            request.match = self._guides.match(compiled, request)
            return None
        if match.busy:
            match.look()
        return InvalidRequest(match.fault) if match.fault else None
