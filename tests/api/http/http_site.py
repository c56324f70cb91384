"""An HTTP server whose handlers a test decides."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from api.dialect import problems
from api.http.acceptor import HttpContext, HttpLimits, HttpPeer
from api.http.messages import Check, Headers, HttpRequest, HttpRoutes, HttpStream, whole
from api.http.service import HttpServer, HttpService
from router.metrics import RouterMetrics


class Checked:
    """Only the checks that a test passes."""

    def __init__(self, in_order: Sequence[Check] = ()) -> None:
        self.in_order = in_order

    def headers(self, request: HttpRequest) -> Headers:
        return ()

    def closed(self, peer: HttpPeer) -> None:
        pass


class Site:
    """A server whose handlers a test decides."""

    def __init__(
        self,
        checks: Sequence[Check] = (),
        tls_context: Callable[[], ssl.SSLContext] | None = None,
        **limits: Any,
    ) -> None:
        self.started = asyncio.Event()  # a response to /hold is in progress
        self.proceed = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.whole = b""  # the response of /whole
        self.pieces: list[bytes] = []  # of /stream
        self.may_end = asyncio.Event()  # of /stream, after its pieces
        self.may_end.set()
        self.num_sent = 0
        self.metrics = RouterMetrics()
        routes = HttpRoutes(
            {
                "/echo": {"POST": self._echo},
                "/name": {"POST": self._name},
                "/hold": {"GET": self._hold, "POST": self._take_and_hold},
                "/whole": {"GET": self._whole},
                "/stream": {"GET": self._stream},
                "/fails": {"GET": self._fails},
                "/fails-late": {"GET": self._fails_late},
            },
            {"/below/": {"GET": self._where}},
            problems.error_body,
        )
        allowed = HttpLimits(**{"max_connections": 100, "tick_s": 0.02, **limits})
        self.shared = HttpContext(allowed, problems.error_body, self.metrics)
        service = HttpService(self.shared, routes, Checked(checks))
        self.server = HttpServer(self.shared, service, tls_context)
        self.port = 0

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def _echo(self, asked: HttpRequest) -> web.StreamResponse:
        return whole(200, asked.take_body(), "application/octet-stream")

    async def _name(self, asked: HttpRequest) -> web.StreamResponse:
        return whole(200, (asked.header("name") or "none").encode(), "text/plain")

    async def _where(self, asked: HttpRequest) -> web.StreamResponse:
        return whole(200, asked.route.encode(), "text/plain")

    async def _hold(self, asked: HttpRequest) -> web.StreamResponse:
        self.started.set()
        try:
            await self.proceed.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return whole(200, b"held")

    async def _take_and_hold(self, asked: HttpRequest) -> web.StreamResponse:
        asked.take_body()
        return await self._hold(asked)

    async def _whole(self, asked: HttpRequest) -> web.StreamResponse:
        return whole(200, self.whole, "text/plain")

    async def _stream(self, asked: HttpRequest) -> web.StreamResponse:
        stream = HttpStream(asked, "text/plain")
        try:
            for piece in self.pieces:
                await stream.send(piece)
                self.num_sent += 1
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        stream.finish(b"end")
        return stream

    async def _fails(self, asked: HttpRequest) -> web.StreamResponse:
        raise ValueError("a bug")

    async def _fails_late(self, asked: HttpRequest) -> web.StreamResponse:
        await HttpStream(asked, "text/plain").send(b"begun")
        raise ValueError("a bug")


@asynccontextmanager
async def site(checks: Sequence[Check] = (), **given: Any) -> AsyncIterator[Site]:
    made = Site(checks, **given)
    made.port = await made.server.start("127.0.0.1", 0)
    try:
        yield made
    finally:
        await made.server.stop(1.0)
