"""Baton's router with aiohttp.web under the same routes, to see what its own HTTP server saves.

    python -m bench._router_on_aiohttp --model ... (as `python -m router`)

It streams and answers; it has none of the limits and deadlines of router/http.
"""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from router.__main__ import main
from router.api.http.request import Request
from router.api.http.responder import EVENT_STREAM, JSON, Headers
from router.api.http.shared import Shared
from router.process import assembly


class Streamed(web.StreamResponse):
    _send_headers_immediately = False  # one write for the head and the first piece


class Responder:
    """As router.http.responder's."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None
        self.last: bytes | None = None
        self.status = 0
        self.finished = False

    def reply(self, status: int, body: bytes, kind: str = JSON, headers: Headers = ()) -> None:
        self.status, self.finished = status, True
        fields = (("content-type", kind), *headers)
        self.response = web.Response(status=status, body=body, headers=fields)

    @property
    def slow(self) -> bool:
        return bool(self._request.protocol.writing_paused)

    def push(self, piece: bytes, kind: str = EVENT_STREAM, headers: Headers = ()) -> None:
        _at_once(self._begun(kind, headers).write(piece))

    async def send(self, piece: bytes, kind: str = EVENT_STREAM, headers: Headers = ()) -> None:
        await self._begun(kind, headers).write(piece)

    def finish(self, piece: bytes = b"", kind: str = EVENT_STREAM, headers: Headers = ()) -> None:
        self._begun(kind, headers)
        self.last, self.finished = piece, True

    def _begun(self, kind: str, headers: Headers) -> web.StreamResponse:
        if self.response is None:
            self.status = 200
            self.response = Streamed(headers=(("content-type", kind), *headers))
            _at_once(self.response.prepare(self._request))
        return self.response


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Runs what does not wait while its client is not slow."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("a write to a client that is not slow has waited")


class HttpServer:
    """As router.http.server's."""

    def __init__(self, shared: Shared, contexts: object = None) -> None:
        self._shared = shared
        self._listener: asyncio.Server

    async def start(self, host: str, port: int, *, shares_port: bool = False) -> int:
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(server, host, port, backlog=1024)
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def drain(self) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        self._listener.close()

    async def _handle(self, asked: web.BaseRequest) -> web.StreamResponse | None:
        body = await asked.read()
        headers = {name.lower(): value for name, value in asked.raw_headers}
        request = Request(
            asked.method, asked.path, headers, body, takes_chunks=True, keep_alive=True
        )
        responder: Any = Responder(asked)
        await self._shared.route(request)(request, responder)
        self._shared.metrics.http_answered(responder.status)
        if responder.last is not None:
            await responder.response.write_eof(responder.last)
        answer: web.StreamResponse | None = responder.response
        return answer


if __name__ == "__main__":
    assembly.HttpServer = HttpServer  # type: ignore[assignment,misc]
    main(sys.argv[1:])
