"""One command of operators over HTTP: from its body to its response."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from api.dialect import problems
from api.dialect.bodies import BodyReader, take_json
from api.dialect.ignored_fields import IgnoredFields
from api.dialect.problems import ApiError
from api.http.answers import whole
from api.http.request import HttpRequest
from common.errors import FailedPrecondition, ServingError

F = TypeVar("F", bound=msgspec.Struct)


class OperatorCommand(Generic[F]):
    """HTTP handler of one command."""

    def __init__(
        self,
        fields: type[F],
        run: Callable[[F], Awaitable[Mapping[str, Any] | str]],
        unsupported: Mapping[str, IgnoredFields],
    ) -> None:
        """
        Args:
            run: runs the command. Returns the JSON object or the text of the response.
            unsupported: see BodyReader.
        """
        self._reader = BodyReader(fields, unsupported, ignore_unknown=False)
        self._run = run

    async def __call__(self, request: HttpRequest) -> web.Response:
        try:
            done = await self._run(self._reader.read(_json(request)))
        except ApiError as refusal:
            return refusal.response()
        except FailedPrecondition as error:
            return ApiError(409, str(error)).response()
        except ServingError as error:
            return problems.of_error(error, self._reader.names).response()
        if isinstance(done, str):
            return whole(200, done.encode(), "text/plain; charset=utf-8")
        return whole(200, msgspec.json.encode(done))


def _json(request: HttpRequest) -> bytes:
    """Return the request's JSON body.

    An empty body counts as {} unless a web page may have sent it.
    """
    if not request.body and not request.header("origin"):
        request.take_body()
        return b"{}"
    return take_json(request)
