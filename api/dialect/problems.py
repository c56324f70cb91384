"""Errors in OpenAI's format: a status and {"error": {message, type, param, code}}."""

import re
from collections.abc import Iterable, Mapping
from math import ceil
from typing import Self, TypeAlias

import msgspec
from aiohttp import web
from grpc import StatusCode

from api.http.messages import Headers, whole
from common.errors import Overloaded, RateLimited, ServingError, cut
from common.requests.sampling import KINDS

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
    415: (("accept-encoding", "identity"),),
    429: (("retry-after", "1"),),
    # OpenAI's clients would retry, and the request may crash engines.
    500: (("x-should-retry", "false"),),
    503: (("retry-after", "1"),),
}
# The message of an InvalidRequest begins with the field's gRPC name, optionally with a path into
# it.
_FIELD = re.compile(r"(?:sampling\.)?([a-z_]+)")
_PATH = re.compile(r"(?:\[\d+\]|\.\w+)*")
_FORMS = frozenset({*KINDS, "guide"})
_OUR_NAMES = {
    "text": "prompt",
    "token_ids": "prompt",
    "thinking_budget": "thinking_token_budget",
}

# The name that an endpoint's clients use for each field, by the router's own name.
Fields: TypeAlias = Mapping[str, str]


def fields_of(names: Iterable[str]) -> Fields:
    """Return the fields of an endpoint with these names, by the router's own names."""
    own = {name: name for name in names}
    return {**own, **{our: name for our, name in _OUR_NAMES.items() if name in own}}


class Words(msgspec.Struct, frozen=True):
    """Error vocabulary of one API."""

    kinds: Mapping[int, str]  # error types by status
    request: str  # error type of other client errors
    server: str  # error type of all other statuses
    envelope: Mapping[str, str] = {}  # further fields of an error body, beside `error`


OPENAI = Words({429: "rate_limit_error"}, "invalid_request_error", "server_error")
ANTHROPIC = Words(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    },
    "invalid_request_error",
    "api_error",
    {"type": "error"},
)


class ApiError(Exception):
    """An error response, or the end of a response that has already begun.

    Args:
        param: the invalid field of the request.
        code: machine-readable error code.
        retry_after_s: seconds until a retry. None: the default of the status.
    """

    words = OPENAI

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
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
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({**self.words.envelope, "error": error})

    @property
    def kind(self) -> str:
        other = self.words.server if self.status >= 500 else self.words.request
        return self.words.kinds.get(self.status, other)

    def in_words(self, words: Words) -> Self:
        """Set the vocabulary of this error to that API's, in place, and return it."""
        self.words = words
        return self

    def response(self, headers: Headers = ()) -> web.Response:
        return whole(self.status, self.body, headers=(*self.headers, *headers))


def invalid(field: str, problem: str, code: str | None = None) -> ApiError:
    """Return the error for a field. Its message is the field's path and the problem.

    Args:
        problem: begins with a verb, or with a colon.
        code: machine-readable error code.
    """
    separator = "" if problem.startswith(":") else " "
    return ApiError(400, f"{field}{separator}{problem}", param=field, code=code)


def of_error(error: ServingError, fields: Fields, form: str = "") -> ApiError:
    """Return the error response for a ServingError.

    Args:
        fields: fields that the request can have. Errors name the field that the client sent.
        form: name of the field that requested a response format.
    """
    status = _STATUS.get(error.status, 500)
    message = str(error)
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded" if isinstance(error, RateLimited) else None
        return ApiError(status, message, code=code, retry_after_s=error.retry_after_s)
    if status in _CODES:
        return ApiError(status, message, code=_CODES[status])
    if status != 400 or (found := _FIELD.match(message)) is None:
        return ApiError(status, message)
    ours = found[1]
    name = form if ours in _FORMS and form else fields.get(ours)
    if name is None:
        return ApiError(status, message)
    end = found.end()
    if name.rpartition(".")[2] != ours and (path := _PATH.match(message, end)):
        end = path.end()  # a path into the router's field does not exist in the client's
    return ApiError(status, name + message[end:], param=name)


def error_body(status: int, sentence: str) -> bytes:
    """Return an error body that names no field."""
    return ApiError(status, sentence).body
