"""An HTTP server whose handlers a test decides."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from api.dialect import problems
from api.http.answers import Headers, Stream, whole
from api.http.request import Check, Request
from api.http.routes import Routes
from api.http.server import HttpServer
from api.http.service import Service
from api.http.shared import Limits, Peer, Shared
from router.metrics import RouterMetrics


class Checked:
    """The checks that a test gives, and nothing else."""

    def __init__(self, in_order: Sequence[Check] = ()) -> None:
        self.in_order = in_order

    def headers(self, request: Request) -> Headers:
        return ()

    def closed(self, peer: Peer) -> None:
        pass


class Site:
    """A server whose handlers a test decides."""

    def __init__(self, checks: Sequence[Check] = (), **limits: Any) -> None:
        self.started = asyncio.Event()  # /hold is being answered
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.whole = b""  # what /whole answers
        self.pieces: list[bytes] = []  # of /stream
        self.may_end = asyncio.Event()  # /stream, behind its pieces
        self.may_end.set()
        self.num_sent = 0
        self.metrics = RouterMetrics()
        routes = Routes(
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
        allowed = Limits(**{"max_connections": 100, "tick_s": 0.02, **limits})
        self.shared = Shared(allowed, problems.error_body, self.metrics)
        self.server = HttpServer(self.shared, Service(self.shared, routes, Checked(checks)))
        self.port = 0

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def _echo(self, asked: Request) -> web.StreamResponse:
        return whole(200, asked.take_body(), "application/octet-stream")

    async def _name(self, asked: Request) -> web.StreamResponse:
        return whole(200, (asked.header("name") or "none").encode(), "text/plain")

    async def _where(self, asked: Request) -> web.StreamResponse:
        return whole(200, asked.route.encode(), "text/plain")

    async def _hold(self, asked: Request) -> web.StreamResponse:
        self.started.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return whole(200, b"held")

    async def _take_and_hold(self, asked: Request) -> web.StreamResponse:
        asked.take_body()
        return await self._hold(asked)

    async def _whole(self, asked: Request) -> web.StreamResponse:
        return whole(200, self.whole, "text/plain")

    async def _stream(self, asked: Request) -> web.StreamResponse:
        stream = Stream(asked, "text/plain")
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

    async def _fails(self, asked: Request) -> web.StreamResponse:
        raise ValueError("a bug")

    async def _fails_late(self, asked: Request) -> web.StreamResponse:
        await Stream(asked, "text/plain").send(b"begun")
        raise ValueError("a bug")


@asynccontextmanager
async def site(checks: Sequence[Check] = (), **limits: Any) -> AsyncIterator[Site]:
    made = Site(checks, **limits)
    made.port = await made.server.start("127.0.0.1", 0)
    try:
        yield made
    finally:
        await made.server.stop(1.0)
