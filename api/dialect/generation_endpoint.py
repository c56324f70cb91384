"""HTTP requests with a prompt, from the body to the end of the response, for all HTTP APIs.

A reply is one whole body, or server-sent events.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from api.auth.client import Client
from api.dialect import problems
from api.dialect.bodies import BodyReader, name_ignored, take_json
from api.dialect.models import ModelNames
from api.dialect.problems import OPENAI, ApiError, Fields, Words
from api.generation import DeadlineScope, new_request_id
from api.http.messages import EVENT_STREAM, Headers, HttpRequest, HttpStream, whole
from api.requests.answer import FinalChunk, OutputChunk
from api.requests.generate_params import GenerateParams, all_of
from api.requests.idempotency import IdempotencyCache, IdempotentRetry
from common.errors import ServingError
from common.logs import Throttle, ThrottledLog
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class WholeReply:
    """A response with one body at the end.

    Calls `add` with each piece and the index of its choice, then `body` after all choices.
    """

    def __init__(
        self,
        add: Callable[[int, OutputChunk], None],
        body: Callable[[], bytes],
        headers: Headers,
    ) -> None:
        self._add = add
        self._body = body
        self._headers = headers

    async def write(self, index: int, piece: OutputChunk | FinalChunk) -> None:
        self._add(index, piece)

    def offer(self, index: int, piece: OutputChunk) -> bool:
        """Write output other than the last, unless the client is slow. Return whether it did."""
        self._add(index, piece)
        return True

    def response(self) -> web.StreamResponse:
        """Return the HTTP response, after all choices have ended."""
        return whole(200, self._body(), headers=self._headers)

    def failed(self, why: ApiError) -> web.StreamResponse:
        """Return the response to a request that failed, possibly in the middle of a stream."""
        return why.response(self._headers)


def _error_event(why: ApiError) -> bytes:
    """Return the error body as an event, without [DONE], so that the response looks incomplete."""
    return b"data: " + why.body + b"\n\n"


class StreamedReply:
    """A response with server-sent events. Has the methods of WholeReply.

    Args:
        event: returns the events of each piece, given the index of its choice. Each is complete,
            with the empty line that ends it.
        end: returns the events after all choices have ended.
        failure: returns the event that ends the stream after an error.
    """

    def __init__(
        self,
        event: Callable[[int, OutputChunk], bytes],
        end: Callable[[], bytes],
        num_choices: int,
        request: HttpRequest,
        headers: Headers,
        failure: Callable[[ApiError], bytes] = _error_event,
    ) -> None:
        self._event = event
        self._end = end
        self._num_left = num_choices
        self._headers = headers
        self._stream = HttpStream(
            request,
            EVENT_STREAM,
            (("cache-control", "no-cache"), ("x-accel-buffering", "no"), *headers),
        )
        self._failure = failure

    async def write(self, index: int, piece: OutputChunk | FinalChunk) -> None:
        event = self._event(index, piece)
        self._num_left -= isinstance(piece, FinalChunk)
        if not self._num_left:
            self._stream.finish(event + self._end())
        elif event:
            await self._stream.send(event)

    def offer(self, index: int, piece: OutputChunk) -> bool:
        if self._stream.slow:
            return False
        if event := self._event(index, piece):
            self._stream.push(event)
        return True

    def response(self) -> web.StreamResponse:
        return self._stream

    def failed(self, why: ApiError) -> web.StreamResponse:
        if self._stream.finished:  # only a slow client kept the one choice waiting
            return self._stream
        if not self._stream.prepared:
            return why.response(self._headers)
        self._stream.finish(self._failure(why))
        return self._stream


class RequestOrigin(msgspec.Struct, frozen=True):
    id: str
    model: str
    created: int  # seconds since 1970

    @classmethod
    def now(cls, answer_id: str, model: str) -> Self:
        return cls(answer_id, model, int(time.time()))


# Writes the response to one request, with all of its choices.
EndpointReply: TypeAlias = WholeReply | StreamedReply
BeginReply: TypeAlias = Callable[[RequestOrigin, HttpRequest, Headers], EndpointReply]


class EndpointCall(msgspec.Struct, frozen=True):
    model: str | None  # None: the served model
    requests: Sequence[GenerateParams]  # one per choice, in the order of their indices, without ids
    session_id: str  # "": no session
    reply: BeginReply
    lora_path: str | None = None  # an adapter in addition to `model`
    form: str = ""  # the field that asks for a response format
    ignored: Sequence[str] = ()  # fields that do not affect the response


class ApiDialect(Protocol):
    """One endpoint's request and response formats."""

    id_prefix: str
    field_names: Fields
    words: Words  # error vocabulary

    def read(self, body: bytes) -> EndpointCall:
        """Parse a body. Raise ApiError if it is invalid."""
        ...


Event = dict[str, Any]  # its "type" determines its other fields
_encode = msgspec.json.Encoder().encode


# Named events as a stream, or the whole response at the end. The endpoint provides their format.
class EventReply(Protocol):
    """One response in its endpoint's format.

    Attributes:
        last: the whole response, after it has ended.
    """

    last: Event

    def add(self, piece: OutputChunk | FinalChunk) -> Iterator[Event]:
        """Yield the events of this piece. The iterator must be exhausted, event by event.

        An event is valid only at the moment when it is yielded, because later events change its
        content.
        """
        ...

    def failed(self, why: ApiError) -> Event:
        """Return the event that ends a response after part of it has been sent."""
        ...


def reply_of(
    reply: EventReply, stream: bool, request: HttpRequest, headers: Headers
) -> EndpointReply:
    def events(index: int, piece: OutputChunk) -> bytes:
        return b"".join(map(_line, reply.add(piece)))

    def add(index: int, piece: OutputChunk) -> None:
        for _ in reply.add(piece):
            pass

    if not stream:
        return WholeReply(add, lambda: _encode(reply.last), headers)
    return StreamedReply(
        events,
        lambda: b"",
        1,
        request,
        headers,
        failure=lambda why: _line(reply.failed(why)),
    )


def _line(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))


# Counts that many generation requests and returns their client. Raises ServingError if a limit
# rejects them.
Begin = Callable[[HttpRequest, int], Client]


class GenerationEndpoint:
    """HTTP handler of a generation endpoint. For one event loop."""

    def __init__(
        self,
        dialect: ApiDialect,
        answers: IdempotencyCache,
        metrics: RouterMetrics,
        begin: Begin,  # called after a request is parsed, before any work on it
        *,
        names: ModelNames,  # model names that clients may use
    ) -> None:
        self._dialect = dialect
        self._answers = answers
        self._metrics = metrics
        self._begin = begin
        self._names = names
        self._refusals = ThrottledLog(log, Throttle())

    async def __call__(self, request: HttpRequest) -> web.StreamResponse:
        """Serve a request. Cancelling this call cancels every choice on its nodes."""
        request_id = new_request_id()
        label = request.header("x-request-id")
        headers = id_headers(label, request_id)
        try:
            body = take_json(request)
            asked = self._dialect.read(body)
            name_ignored(request, asked.ignored)
            adapter = self._names.adapter(asked.model, asked.lora_path)
            client = self._begin(request, len(asked.requests))
            retry = self._retry(client, request, body, request_id)
            del body  # releases the memory: it is not needed until the response ends
        except ApiError as refusal:
            self._metrics.rejected("invalid")
            self._refusals.info(
                "request rejected", request_id=request_id, label=label, reason=refusal
            )
            return refusal.in_words(self._dialect.words).response(headers)
        except ServingError as error:
            return self._problem(error).response(headers)
        if retry is not None:
            request_id = retry.request_id
            headers = id_headers(label, request_id)
        if client.usage is not None:
            headers += client.usage.headers()
        origin = RequestOrigin.now(
            self._dialect.id_prefix + request_id, adapter or self._names.served
        )
        reply = asked.reply(origin, request, headers)
        traceparent = request.header("traceparent")
        session_id = _session_id(request, asked)
        choices = [
            replace(choice, request_id=own, label=label, session_id=session_id, adapter=adapter)
            for choice, own in zip(asked.requests, _ids(request_id, asked), strict=True)
        ]
        try:
            await self._generate(choices, client, reply, traceparent, retry)
        except ServingError as error:
            return reply.failed(self._problem(error, asked.form))
        return reply.response()

    def _retry(
        self, client: Client, request: HttpRequest, body: bytes, request_id: str
    ) -> IdempotentRetry | None:
        if not (key := request.header("idempotency-key")):
            return None
        return self._answers.retry(client, key, lambda: request.route.encode() + body, request_id)

    def _problem(self, error: ServingError, form: str = "") -> ApiError:
        refusal = problems.of_error(error, self._dialect.field_names, form)
        return refusal.in_words(self._dialect.words)

    async def _generate(
        self,
        choices: Sequence[GenerateParams],
        client: Client,
        reply: EndpointReply,
        traceparent: str,
        retry: IdempotentRetry | None,
    ) -> None:
        """Run all choices concurrently. The first failure ends the others."""

        def generated(index: int) -> Coroutine[Any, Any, None]:
            write, offer = partial(reply.write, index), partial(reply.offer, index)
            call = choices[index], client, write, traceparent, offer
            if retry is None:
                return self._answers.generator.generate(*call)
            return self._answers.generate(*call, retry=retry, index=index)

        await all_of([generated(index) for index in range(len(choices))])


def id_headers(label: str, request_id: str) -> tuple[tuple[str, str], ...]:
    """Return the id headers. Proxies expect their own x-request-id back."""
    return ("x-request-id", label or request_id), ("baton-request-id", request_id)


def _ids(request_id: str, asked: EndpointCall) -> list[str]:
    if len(asked.requests) == 1:
        return [request_id]
    return [f"{request_id}-{index}" for index in range(len(asked.requests))]


def _session_id(request: HttpRequest, asked: EndpointCall) -> str:
    """Return the session id. Headers take precedence, because proxies can set them."""
    named = request.header("x-session-id") or request.header("x-smg-routing-key")
    return named or asked.session_id


F = TypeVar("F", bound=msgspec.Struct)


class PromptEndpoint:
    """Base of HTTP handlers that use a prompt without generating, such as /tokenize.

    Args:
        begin, names: see GenerationEndpoint.
        budget_s: time limit of a request, in seconds.
    """

    def __init__(self, begin: Begin, names: ModelNames, budget_s: float) -> None:
        self._begin = begin
        self._names = names
        self._budget_s = budget_s

    async def answered(
        self,
        request: HttpRequest,
        reader: BodyReader[F],
        answer: Callable[[F, Client], Awaitable[msgspec.Struct]],
        words: Words = OPENAI,
    ) -> web.Response:
        """Run a handler within the limits and return its response.

        Args:
            reader: reader of the body. Its record has a `model`.
            answer: called with the fields and the client. Raises ApiError or ServingError.
            words: error vocabulary.
        """
        try:
            client = self._begin(request, 1)
            with DeadlineScope(self._budget_s):
                ignored: list[str] = []
                fields: Any = reader.read(take_json(request), ignored)
                name_ignored(request, ignored)
                self._names.adapter(fields.model)
                return whole(200, msgspec.json.encode(await answer(fields, client)))
        except ApiError as refusal:
            return refusal.in_words(words).response()
        except ServingError as error:
            return problems.of_error(error, reader.names).in_words(words).response()
