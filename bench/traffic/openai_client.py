"""Client of the OpenAI API: sends a WorkloadRequest and records the time of every event.

Works with any server that streams completions or chat with usage. Failures are outcomes, never
exceptions.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from bench.errors import InvalidInput, UnusableRun
from bench.traffic.load import RequestOutcome
from bench.traffic.workload import WorkloadRequest

Send = Literal["ids", "text", "chat"]
SENDS: tuple[Send, ...] = ("ids", "text", "chat")

_CONNECT_S = 10.0
_MODELS_S = 10.0  # seconds for the list of models
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "was", "for", "on", "are", "with", "as")
_MAX_DETAIL = 300
_MAX_EVENT_BYTES = 1 << 20


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_read_event = msgspec.json.Decoder(_Event).decode


class ServedModelInfo(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ServedModelInfo]


def base_url(url: str) -> str:
    """Return the URL without a final /v1 and slashes. Raises InvalidInput."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidInput(f"{url!r} is not a URL of the form http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class OpenAiClient:
    """Client for one model of one server. For one event loop. The owner closes it."""

    def __init__(
        self,
        url: str,
        *,
        send: Send,
        timeout_s: float,
        extra: Mapping[str, Any] | None = None,
        api_key: str | None = None,
    ) -> None:
        """Configure the requests. Call it on the event loop.

        Args:
            url: as `base_url` returns it.
            send: prompts as token ids or as words to /v1/completions, or as words to
                /v1/chat/completions. A word is about a token. Reports use the server's count.
            timeout_s: timeout of a whole response, in seconds.
            extra: additional fields of every request's body.
        """
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        )
        self._url = url
        self._send = send
        self._path = "/v1/chat/completions" if send == "chat" else "/v1/completions"
        self._timeout_s = timeout_s
        self._extra = dict(extra or {})
        self._model = ""

    async def close(self) -> None:
        await self._http.close()

    async def choose_model(self, name: str | None = None) -> ServedModelInfo:
        """Choose the model of every request.

        Args:
            name: a model of the server. None: its first.

        Raises:
            UnusableRun: the server or the model does not exist.
        """
        url = f"{self._url}/v1/models"
        try:
            async with asyncio.timeout(_MODELS_S), self._http.get(url) as response:
                if response.status != 200:
                    raise UnusableRun(f"{url}: status {response.status}")
                models = msgspec.json.decode(await response.read(), type=_Models).data
        except TimeoutError:
            raise UnusableRun(f"{url}: no response within {_MODELS_S:g} s") from None
        except aiohttp.ClientError as error:
            raise UnusableRun(f"{url}: {_reason(error)}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise UnusableRun(f"{url}: the response is not a list of models") from None
        for model in models:
            if name in (None, model.id):
                self._model = model.id
                return model
        there = ", ".join(model.id for model in models) or "none"
        raise UnusableRun(f"there is no model {name!r} (the server has {there})")

    async def ask(self, job: WorkloadRequest, start: float, due: float) -> RequestOutcome:
        """Send one request immediately and return its outcome.

        Args:
            start: time.perf_counter() of the run's start.
            due: scheduled sending time, in seconds from `start`.
        """
        body = self._body(job)
        outcome = RequestOutcome(job.group, len(job.prompt), due, time.perf_counter() - start)
        stream = _EventStream(outcome, start, counts_empty=self._send != "chat")
        headers = {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.post(self._url + self._path, data=body, headers=headers) as response,
            ):
                async for data in response.content.iter_any():
                    stream.feed(time.perf_counter(), data)
            stream.end(response.status)
        except aiohttp.ClientConnectorError as error:
            stream.fail("connect", _reason(error))
        except aiohttp.ConnectionTimeoutError:
            stream.fail("connect", f"no connection within {_CONNECT_S:g} s")
        except TimeoutError:
            stream.fail("timeout", f"no complete response within {self._timeout_s:g} s")
        except aiohttp.ClientError as error:
            stream.fail("cut off", f"the connection ended before the response did: {error}")
        outcome.ended = time.perf_counter() - start
        return outcome

    def _body(self, job: WorkloadRequest) -> bytes:
        fields: dict[str, Any] = {
            "model": self._model,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        match self._send:
            case "ids":
                fields["prompt"] = list(job.prompt)
            case "text":
                fields["prompt"] = _words(job)
            case "chat":
                fields["messages"] = [{"role": "user", "content": _words(job)}]
        return msgspec.json.encode(fields | self._extra)


def _words(job: WorkloadRequest) -> str:
    return " ".join(_WORDS[token % len(_WORDS)] for token in job.prompt)


def _reason(error: aiohttp.ClientError) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


class _EventStream:
    """Parses one response's server-sent events into its outcome.

    Args:
        counts_empty: count a choice without text as a token, because it may be a part of a
            character. False for chat, in which the choice without text has only the role.
    """

    def __init__(self, outcome: RequestOutcome, start: float, *, counts_empty: bool) -> None:
        self._outcome = outcome
        self._start = start
        self._counts_empty = counts_empty
        self._rest = b""
        self._done = False
        self._num_tokens = 0  # by the usage of the chunks so far

    def feed(self, now: float, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        *events, self._rest = data.replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            self.fail("no events", "the response is not a stream of events")
            self._rest = b""
        for event in events:
            if event.startswith(b"data:"):
                self._read(event[5:].strip(), now - self._start)

    def end(self, status: int) -> None:
        """Complete the outcome at the end of the response."""
        if status != 200:
            self.fail(f"status {status}", _error_message(self._rest))
        elif not self._done:
            self.fail("cut off", "the stream ended without [DONE]")
        elif not self._outcome.chunks:
            self.fail("no tokens", "a response without a token")
        elif not self._outcome.usage_reported:
            self._outcome.output_tokens = len(self._outcome.chunks)

    def fail(self, kind: str, detail: str) -> None:
        """Record a failure. Only the first one is kept."""
        if not self._outcome.error:
            self._outcome.error, self._outcome.detail = kind, detail[:_MAX_DETAIL]

    def _read(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = _read_event(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.fail("no events", f"invalid event: {error}")
            return
        if event.error is not None:
            self.fail("error event", _error_message(data))
            return
        outcome, usage = self._outcome, event.usage
        if usage is not None:
            outcome.usage_reported = True
            outcome.prompt_tokens = usage.prompt_tokens
            outcome.output_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        if any(self._has_token(choice) for choice in event.choices):
            outcome.chunks.append(now)
            if usage is not None:
                outcome.chunk_tokens.append(usage.completion_tokens - self._num_tokens)
                self._num_tokens = usage.completion_tokens

    def _has_token(self, choice: _Choice) -> bool:
        delta = choice.delta
        if choice.text or (delta and (delta.content or delta.reasoning_content)):
            return True
        return self._counts_empty and choice.finish_reason is None


def _error_message(body: bytes) -> str:
    """Return the message of an error body, in OpenAI's or any other form."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        return body.decode(errors="replace").strip()
