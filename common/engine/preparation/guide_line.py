"""Requests whose guide is being compiled: they hold nothing, and nobody waits for them."""

from collections.abc import Iterator
from concurrent.futures import Future

from common.engine.features.guides import Compiled, Guides
from common.engine.rows.request import Request
from common.errors import ServingError


class GuideLine:
    """Engine thread only."""

    name = "guided"

    def __init__(self, guides: Guides) -> None:
        self._guides = guides
        self._waiting: dict[int, tuple[Request, Future[Compiled]]] = {}  # by key

    def __len__(self) -> int:
        return len(self._waiting)

    def needed_by(self, request: Request) -> bool:
        return request.sampling.guide is not None

    def put(self, request: Request) -> None:
        """A request with a guide.

        Raises:
            Overloaded: too many guides wait.
        """
        guide = request.sampling.guide
        assert guide is not None
        self._waiting[request.key] = request, self._guides.compiled(guide)

    def remove(self, request: Request) -> bool:
        return self._waiting.pop(request.key, None) is not None

    def take(self, now: float) -> Iterator[tuple[Request, ServingError | None]]:
        """Those whose guide is compiled, which they have now, or is none, and why. Takes them."""
        for key, (request, compiled) in list(self._waiting.items()):
            if not compiled.done():
                continue
            del self._waiting[key]
            error = compiled.exception()
            if error is None:
                request.compiled = compiled.result()
            elif not isinstance(error, ServingError):
                raise error
            yield request, error
