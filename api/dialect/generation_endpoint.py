"""HTTP requests with a prompt, from the body to the end of the response, for all HTTP APIs.

A reply is one whole body, or server-sent events.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from api.auth.client import Client
from api.dialect import problems
from api.dialect.bodies import BodyReader, name_ignored, take_json
from api.dialect.ignored_fields import IgnoredFields
from api.dialect.models import ModelNames
from api.dialect.problems import OPENAI, ApiError, Words
from api.generation import DeadlineScope, new_request_id
from api.http.messages import EVENT_STREAM, Headers, HttpRequest, HttpStream, whole
from api.idempotency import IdempotencyCache, IdempotentRetry
from api.parsers.model_format import ModelFormat
from api.requests.answer import FinalChunk, OutputChunk
from api.requests.generate_params import GenerateParams, all_of
from api.requests.served_model import ServedModel
from common.errors import ServingError
from common.logs import ThrottledLog
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class RequestOrigin(msgspec.Struct, frozen=True):
    id: str
    model: str
    created: int  # seconds since 1970

    @classmethod
    def now(cls, answer_id: str, model: str) -> Self:
        return cls(answer_id, model, int(time.time()))


class ResponseContent(ABC):
    """The response to one request, with all of its choices, in its endpoint's format."""

    @abstractmethod
    def add(self, index: int, piece: OutputChunk | FinalChunk) -> bytes:
        """Add a piece of a choice, and return its events. b"": there is nothing to send yet."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the last events, or the body of a response that is not streamed.

        Called after all choices have ended.
        """

    def failed(self, why: ApiError) -> bytes:
        """Return the event that ends a stream after an error.

        It is not followed by [DONE], so that the response looks incomplete.
        """
        return b"data: " + why.body + b"\n\n"


Event = dict[str, Any]  # its "type" determines its other fields
encode = msgspec.json.Encoder().encode


class EventContent(ResponseContent):
    """A response with one choice, whose events have names.

    Attributes:
        last: the whole response, after it has ended.
    """

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self.last: Event = {}

    @abstractmethod
    def events(self, piece: OutputChunk | FinalChunk) -> Iterator[Event]:
        """Yield the events of this piece. The iterator must be exhausted, event by event.

        An event is valid only at the moment when it is yielded, because later events change its
        content.
        """

    @abstractmethod
    def failure(self, why: ApiError) -> Event:
        """Return the event that ends a stream after an error."""

    def add(self, index: int, piece: OutputChunk | FinalChunk) -> bytes:
        return b"".join(_line(event) if self._stream else b"" for event in self.events(piece))

    def end(self) -> bytes:
        return b"" if self._stream else encode(self.last)

    def failed(self, why: ApiError) -> bytes:
        return _line(self.failure(why))


def _line(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


class HttpReply:
    """Sends the content of a response: as server-sent events, or as one body at the end."""

    def __init__(
        self,
        content: ResponseContent,
        num_choices: int,
        request: HttpRequest,
        headers: Headers,
        *,
        stream: bool,
    ) -> None:
        self._content = content
        self._num_left = num_choices
        self._headers = headers
        fields = (("cache-control", "no-cache"), ("x-accel-buffering", "no"), *headers)
        self._stream = HttpStream(request, EVENT_STREAM, fields) if stream else None

    async def write(self, index: int, piece: OutputChunk | FinalChunk) -> None:
        events = self._content.add(index, piece)
        self._num_left -= isinstance(piece, FinalChunk)
        if self._stream is None:
            return
        if not self._num_left:
            self._stream.finish(events + self._content.end())
        elif events:
            await self._stream.send(events)

    def offer(self, index: int, piece: OutputChunk) -> bool:
        """Write output other than the last, unless the client is slow. Return whether it did."""
        if self._stream is not None and self._stream.slow:
            return False
        events = self._content.add(index, piece)
        if self._stream is not None and events:
            self._stream.push(events)
        return True

    def response(self) -> web.StreamResponse:
        """Return the HTTP response, after all choices have ended."""
        if self._stream is None:
            return whole(200, self._content.end(), headers=self._headers)
        return self._stream

    def failed(self, why: ApiError) -> web.StreamResponse:
        """Return the response to a request that failed, possibly in the middle of a stream."""
        stream = self._stream
        if stream is None or not (stream.prepared or stream.finished):
            return why.response(self._headers)
        if not stream.finished:  # otherwise only a slow client kept the last choice waiting
            stream.finish(self._content.failed(why))
        return stream


class EndpointCall(msgspec.Struct, frozen=True):
    """A request to a generation endpoint.

    Attributes:
        model: None: the served model.
        requests: one for each choice, in the order of their indices, without ids.
        content: makes the response.
        session_id: "": no session.
        lora_path: an adapter in addition to `model`.
        form: the field that asks for a response format.
    """

    model: str | None
    requests: Sequence[GenerateParams]
    content: Callable[[RequestOrigin], ResponseContent]
    stream: bool
    session_id: str = ""
    lora_path: str | None = None
    form: str = ""


F = TypeVar("F", bound=msgspec.Struct)


class Dialect(NamedTuple, Generic[F]):
    """One endpoint's request and response formats.

    Attributes:
        fields: record of the body.
        unsupported: further known fields, see BodyReader.
        call: returns the request of a body with these fields and that many bytes. Appends the
            names of fields that have no effect to the list. Raises ApiError.
        words: error vocabulary.
        other_names: fields that the endpoint names differently, by the name in the router.
    """

    id_prefix: str
    fields: type[F]
    unsupported: Mapping[str, IgnoredFields]
    call: Callable[[F, int, ModelFormat, list[str]], EndpointCall]
    words: Words = OPENAI
    other_names: Mapping[str, str] = {}


class DialectReader(Generic[F]):
    """Reads the requests of one endpoint to one model."""

    def __init__(
        self, dialect: Dialect[F], model_format: ModelFormat, *, ignore_unknown: bool
    ) -> None:
        self.dialect = dialect
        self._format = model_format
        self._reader = BodyReader(
            dialect.fields, dialect.unsupported, ignore_unknown=ignore_unknown
        )
        self.field_names = {**self._reader.names, **dialect.other_names}

    def read(self, body: bytes, ignored: list[str]) -> EndpointCall:
        """Parse a body. Raise ApiError if it is invalid.

        Args:
            ignored: receives the paths of fields that have no effect.
        """
        fields = self._reader.read(body, ignored)
        return self.dialect.call(fields, len(body), self._format, ignored)


# Counts that many generation requests and returns their client. Raises ServingError if a limit
# rejects them.
Begin = Callable[[HttpRequest, int], Client]


class GenerationEndpoint:
    """HTTP handler of a generation endpoint. For one event loop."""

    def __init__(
        self,
        reader: DialectReader[Any],
        idempotency: IdempotencyCache,
        metrics: RouterMetrics,
        begin: Begin,  # called after a request is parsed, before any work on it
        *,
        names: ModelNames,  # model names that clients may use
    ) -> None:
        self._reader = reader
        self._dialect = reader.dialect
        self._idempotency = idempotency
        self._metrics = metrics
        self._begin = begin
        self._names = names
        self._refusals = ThrottledLog(log)

    async def __call__(self, request: HttpRequest) -> web.StreamResponse:
        """Serve a request. Cancelling this call cancels every choice on its nodes."""
        request_id = new_request_id()
        label = request.header("x-request-id")
        headers = id_headers(label, request_id)
        try:
            body = take_json(request)
            ignored: list[str] = []
            call = self._reader.read(body, ignored)
            name_ignored(request, ignored)
            adapter = self._names.adapter(call.model, call.lora_path)
            client = self._begin(request, len(call.requests))
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
        headers += client.usage.headers()
        origin = RequestOrigin.now(
            self._dialect.id_prefix + request_id, adapter or self._names.served
        )
        content, num = call.content(origin), len(call.requests)
        reply = HttpReply(content, num, request, headers, stream=call.stream)
        traceparent = request.header("traceparent")
        # Headers take precedence, because proxies can set them.
        named = request.header("x-session-id") or request.header("x-smg-routing-key")
        same = {"label": label, "session_id": named or call.session_id, "adapter": adapter}
        choices = [
            replace(choice, request_id=f"{request_id}-{index}" if num > 1 else request_id, **same)
            for index, choice in enumerate(call.requests)
        ]
        try:
            await self._generate(choices, client, reply, traceparent, retry)
        except ServingError as error:
            return reply.failed(self._problem(error, call.form))
        return reply.response()

    def _retry(
        self, client: Client, request: HttpRequest, body: bytes, request_id: str
    ) -> IdempotentRetry | None:
        if not (key := request.header("idempotency-key")):
            return None
        return self._idempotency.retry(
            client, key, lambda: request.route.encode() + body, request_id
        )

    def _problem(self, error: ServingError, form: str = "") -> ApiError:
        refusal = problems.of_error(error, self._reader.field_names, form)
        return refusal.in_words(self._dialect.words)

    async def _generate(
        self,
        choices: Sequence[GenerateParams],
        client: Client,
        reply: HttpReply,
        traceparent: str,
        retry: IdempotentRetry | None,
    ) -> None:
        """Run all choices concurrently. The first failure ends the others."""

        def generated(index: int) -> Coroutine[Any, Any, None]:
            write, offer = partial(reply.write, index), partial(reply.offer, index)
            call = choices[index], client, write, traceparent, offer
            if retry is None:
                return self._idempotency.dispatcher.generate(*call)
            return self._idempotency.generate(*call, retry=retry, index=index)

        await all_of([partial(generated, index) for index in range(len(choices))])


def id_headers(label: str, request_id: str) -> tuple[tuple[str, str], ...]:
    """Return the id headers. Proxies expect their own x-request-id back."""
    return ("x-request-id", label or request_id), ("baton-request-id", request_id)


# Returns the response to a prompt's fields. Raises ApiError or ServingError.
PromptAnswer = Callable[[ServedModel, F, Client], Awaitable[msgspec.Struct]]


class PromptEndpoint(Generic[F]):
    """HTTP handler of an endpoint that uses a prompt without generating, such as /tokenize.

    Args:
        reader: reader of the body. Its record has a `model`.
        begin, names: see GenerationEndpoint.
        budget_s: time limit of a request, in seconds.
        words: error vocabulary.
    """

    def __init__(
        self,
        reader: BodyReader[F],
        answer: PromptAnswer[F],
        model: ServedModel,
        begin: Begin,
        names: ModelNames,
        budget_s: float,
        words: Words = OPENAI,
    ) -> None:
        self._reader = reader
        self._answer = answer
        self._model = model
        self._begin = begin
        self._names = names
        self._budget_s = budget_s
        self._words = words

    async def __call__(self, request: HttpRequest) -> web.Response:
        try:
            client = self._begin(request, 1)
            with DeadlineScope(self._budget_s):
                ignored: list[str] = []
                fields: Any = self._reader.read(take_json(request), ignored)
                name_ignored(request, ignored)
                self._names.adapter(fields.model)
                answer = await self._answer(self._model, fields, client)
                return whole(200, msgspec.json.encode(answer))
        except ApiError as refusal:
            return refusal.in_words(self._words).response()
        except ServingError as error:
            problem = problems.of_error(error, self._reader.names)
            return problem.in_words(self._words).response()
