"""An answer in the making: pieces of its choices in, OpenAI's JSON out."""

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from router.api.http.answers import EVENT_STREAM, Headers, Stream, whole
from router.api.http.request import Request
from router.api.openai.asked import Asked, Dialect
from router.api.openai.problems import Refusal
from router.requests.answer import LastPiece, Piece

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET


class Envelope(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[msgspec.Struct]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Origin(msgspec.Struct, frozen=True):
    """What every envelope of one answer says alike."""

    id: str
    model: str
    created: int

    @classmethod
    def now(cls, answer_id: str, model: str) -> "Origin":
        return cls(answer_id, model, int(time.time()))

    def envelope(
        self,
        kind: str,
        choices: Sequence[msgspec.Struct],
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> Envelope:
        return Envelope(self.id, kind, self.created, self.model, choices, usage)


class Reply(Protocol):
    """What becomes of the choices of one request."""

    def response(self) -> web.StreamResponse:
        """Once all have ended."""
        ...

    def failed(self, why: Refusal) -> web.StreamResponse:
        """Instead, if they will not."""
        ...

    async def write(self, index: int, request_id: str, piece: Piece | LastPiece) -> None:
        """Takes what choice `index` adds. After the last piece of all the answer is complete."""
        ...

    def offer(self, index: int, piece: Piece) -> bool:
        """Takes what choice `index` adds, and is not its last, unless the client is slow; returns
        whether it has."""
        ...


class WholeReply:
    """One JSON object at the end."""

    def __init__(
        self, dialect: Dialect, asked: Asked, origin: Origin, request: Request, headers: Headers
    ) -> None:
        self._dialect = dialect
        self._num_per_prompt = asked.num_per_prompt
        self._origin = origin
        self._headers = headers
        self._texts: list[list[str]] = [[] for _ in asked.requests]
        self._ends: dict[int, LastPiece] = {}

    async def write(self, index: int, request_id: str, piece: Piece | LastPiece) -> None:
        self.offer(index, piece)
        if isinstance(piece, LastPiece):
            self._ends[index] = piece

    def offer(self, index: int, piece: Piece) -> bool:
        self._texts[index].append(piece.text)
        return True

    def response(self) -> web.StreamResponse:
        choices = [
            self._dialect.choice(index, "".join(texts), self._ends[index].finish_reason)
            for index, texts in enumerate(self._texts)
        ]
        envelope = self._origin.envelope(
            self._dialect.whole_object, choices, _usage(self._ends, self._num_per_prompt)
        )
        return whole(200, _encode(envelope), headers=self._headers)

    def failed(self, why: Refusal) -> web.StreamResponse:
        return why.response(self._headers)


class StreamedReply:
    """Server-sent events: one for whatever tokens were there, and the last one says [DONE]."""

    def __init__(
        self, dialect: Dialect, asked: Asked, origin: Origin, request: Request, headers: Headers
    ) -> None:
        self._dialect = dialect
        self._num_per_prompt = asked.num_per_prompt
        self._origin = origin
        # With usage asked for, it is in every chunk, and null in all but the last. Every event but
        # that one is this text around its choice.
        usage = None if asked.include_usage else msgspec.UNSET
        envelope = _event(origin.envelope(dialect.chunk_object, (), usage))
        self._before, _, self._after = envelope.rpartition(b"]")
        self._headers = headers
        self._stream = Stream(
            request,
            EVENT_STREAM,
            (("cache-control", "no-cache"), ("x-accel-buffering", "no"), *headers),
        )
        self._tells_usage = asked.include_usage
        self._num_choices = len(asked.requests)
        self._begun: set[int] = set()
        self._ends: dict[int, LastPiece] = {}

    async def write(self, index: int, request_id: str, piece: Piece | LastPiece) -> None:
        if isinstance(piece, LastPiece):
            self._ends[index] = piece
            event = self._event(index, piece.text, piece.finish_reason)
            if len(self._ends) == self._num_choices:
                self._stream.finish(event + self._last_words())
                return
        elif self._is_news(index, piece):
            event = self._event(index, piece.text, None)
        else:
            return
        await self._stream.send(event)

    def offer(self, index: int, piece: Piece) -> bool:
        if self._stream.slow:
            return False
        if self._is_news(index, piece):
            self._stream.push(self._event(index, piece.text, None))
        return True

    def response(self) -> web.StreamResponse:
        return self._stream

    def failed(self, why: Refusal) -> web.StreamResponse:
        if self._stream.finished:  # one choice only waited for a slow client to take its end
            return self._stream
        if not self._stream.prepared:
            return why.response(self._headers)
        # Too late for a status. Without [DONE] no client takes this for the whole answer.
        self._stream.finish(b"data: " + why.body + b"\n\n")
        return self._stream

    def _is_news(self, index: int, piece: Piece) -> bool:
        """Half a character is none; that the answer has begun is."""
        return bool(piece.text) or index not in self._begun

    def _event(self, index: int, text: str, finish_reason: str | None) -> bytes:
        first = index not in self._begun
        self._begun.add(index)
        choice = _encode(self._dialect.chunk(index, text, finish_reason, first))
        return b"%b%b]%b" % (self._before, choice, self._after)

    def _last_words(self) -> bytes:
        if not self._tells_usage:
            return _DONE
        usage = _usage(self._ends, self._num_per_prompt)
        return _event(self._origin.envelope(self._dialect.chunk_object, (), usage)) + _DONE


def _event(envelope: Envelope) -> bytes:
    return b"data: " + _encode(envelope) + b"\n\n"


def _usage(ends: dict[int, LastPiece], num_per_prompt: int) -> Usage:
    """A prompt counts once, however many choices it has."""
    prompts = [ends[index].usage for index in range(0, len(ends), num_per_prompt)]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(end.usage.completion_tokens for end in ends.values())
    cached = [usage.cached_tokens for usage in prompts if usage.cached_tokens is not None]
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(cached)) if cached else msgspec.UNSET,
    )
