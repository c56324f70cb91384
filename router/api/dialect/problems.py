"""What goes wrong, as OpenAI tells it: a status and {"error": {message, type, param, code}}."""

import re
from math import ceil

import msgspec
from aiohttp import web
from grpc import StatusCode

from common.errors import Overloaded, RateLimited, ServingError, cut
from router.api.http.answers import Headers, whole

_STATUS = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
_CODES = {401: "invalid_api_key", 403: "insufficient_permissions"}
_HEADERS = {
    401: (("www-authenticate", "Bearer"),),
    429: (("retry-after", "1"),),
    # OpenAI's clients would send it again, and engines may die of it.
    500: (("x-should-retry", "false"),),
    503: (("retry-after", "1"),),
}
# The sentence of an InvalidRequest begins with the field that it is about, as gRPC names it.
_FIELD = re.compile(r"(?:sampling\.)?([a-z_]+)")
_OUR_NAMES = {
    "text": "prompt",
    "token_ids": "prompt",
    "thinking_budget": "thinking_token_budget",
}


class Refusal(Exception):
    """Why there will be no answer; or, once part of it is out, no more of it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """
        Args:
            param: the field of the request that is wrong.
            code: what programs can tell errors apart by.
            retry_after_s: None: as is usual for the status.
        """
        super().__init__(cut(message))
        self.status = status
        self.param = param
        self.code = code
        self._retry_after_s = retry_after_s

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        if self._retry_after_s is not None:
            return (("retry-after", str(ceil(self._retry_after_s))),)
        return _HEADERS.get(self.status, ())

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": str(self),
                    "type": _kind(self.status),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def response(self, headers: Headers = ()) -> web.Response:
        return whole(self.status, self.body, headers=(*self.headers, *headers))


def of_error(error: ServingError, fields: frozenset[str]) -> Refusal:
    """
    Args:
        fields: names that the request's fields can have.
    """
    status = _STATUS.get(error.status, 500)
    message = str(error)
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded" if isinstance(error, RateLimited) else None
        return Refusal(status, message, code=code, retry_after_s=error.retry_after_s)
    if status in _CODES:
        return Refusal(status, message, code=_CODES[status])
    if status != 400 or (found := _FIELD.match(message)) is None:
        return Refusal(status, message)
    name = _OUR_NAMES.get(found[1], found[1])
    if name not in fields:
        return Refusal(status, message)
    return Refusal(status, name + message[found.end() :], param=name)


def error_body(status: int, sentence: str) -> bytes:
    """The body of an error that no field is to blame for."""
    return Refusal(status, sentence).body


def _kind(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"
