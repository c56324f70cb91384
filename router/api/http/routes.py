"""Which handler answers which method and path."""

from collections.abc import Mapping

from router.api.http.request import Refused, Request
from router.api.http.responder import JSON, Responder
from router.api.http.shared import ErrorBody, Handler


class Routes:
    """Called with a request, gives its handler; one that says why not where there is none."""

    def __init__(
        self,
        exact: Mapping[str, Mapping[str, Handler]],
        below: Mapping[str, Mapping[str, Handler]],
        error_body: ErrorBody,
    ) -> None:
        """
        Args:
            exact: by path, by method. Whatever answers GET answers HEAD too.
            below: the same for every path that begins with this one, which ends with "/".
        """
        self._exact = exact
        self._below = below
        self._error_body = error_body

    def __call__(self, request: Request) -> Handler:
        methods = self._exact.get(request.path) or self._methods_below(request.path)
        if methods is None:
            sentence = f"there is nothing at {request.path}"
            return refusing(Refused(404, self._error_body(404, sentence)))
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join(methods)
            sentence = f"{request.path} takes {allowed}, not {request.method}"
            return refusing(Refused(405, self._error_body(405, sentence), (("allow", allowed),)))
        return handler

    def _methods_below(self, path: str) -> Mapping[str, Handler] | None:
        return next((m for start, m in self._below.items() if path.startswith(start)), None)


def refusing(refused: Refused) -> Handler:
    """A handler that answers every request so."""

    async def refuse(_: Request, responder: Responder) -> None:
        responder.reply(refused.status, refused.body, JSON, refused.headers)

    return refuse
