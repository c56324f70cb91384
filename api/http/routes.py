"""Routing of methods and paths to handlers."""

from collections.abc import Mapping, Sequence

from aiohttp import web

from api.http.answers import whole
from api.http.request import Handler, HttpRequest
from api.http.shared import ErrorBody


class HttpRoutes:
    """The handler of each request. Without one, a handler that returns 404 or 405."""

    def __init__(
        self,
        exact: Mapping[str, Mapping[str, Handler]],
        below: Mapping[str, Mapping[str, Handler]],
        error_body: ErrorBody,
    ) -> None:
        """
        Args:
            exact: handlers by path and method. GET handlers also serve HEAD.
            below: the same for every path that begins with this one, which ends with "/".
        """
        self._exact = exact
        self._below = below
        self._error_body = error_body

    @property
    def paths(self) -> Sequence[str]:
        """Return every path or path prefix that is served."""
        return [*self._exact, *self._below]

    def __call__(self, request: HttpRequest) -> Handler:
        path = request.route
        methods = self._exact.get(path) or self._methods_below(path)
        if methods is None:
            return self._refusing(404, f"there is nothing at {path}")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join(methods)
            sentence = f"{path} takes {allowed}, not {request.method}"
            return self._refusing(405, sentence, (("allow", allowed),))
        return handler

    def _methods_below(self, path: str) -> Mapping[str, Handler] | None:
        return next((m for start, m in self._below.items() if path.startswith(start)), None)

    def _refusing(
        self, status: int, sentence: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> Handler:
        async def refuse(_: HttpRequest) -> web.Response:
            return whole(status, self._error_body(status, sentence), headers=headers)

        return refuse
