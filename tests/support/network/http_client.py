"""A strict HTTP/1.1 client: compares a server's responses byte for byte."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

from aiohttp import EMPTY_PAYLOAD, HttpVersion11
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import StreamWriter
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from api.http.messages import HttpRequest

WAIT_S = 180.0  # seconds for a response of many megabytes, on a busy machine
_LITTLE_ROOM = 64 << 10


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error. It must have exactly this form."""
        content = self.json
        assert content.pop("type", "error") == "error"  # only Anthropic's errors have it
        assert list(content) == ["error"]
        error: dict[str, Any] = content["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """Return the events of a complete stream: each is `data: {json}`, the last one [DONE]."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        return sse_events(self.body)


class Wire:
    """One connection, on which responses must arrive in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, content: object, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        await self.send(request("POST", path, body, **headers))

    async def response(self, wait_s: float = WAIT_S, *, to_head: bool = False) -> Response:
        """Return the next whole response. `to_head`: to a HEAD request, so without its body."""
        async with asyncio.timeout(wait_s):
            status, headers = await self.head()
            if to_head:
                return Response(status, headers, b"")
            if headers.get("transfer-encoding") == "chunked":
                chunks = [chunk async for chunk in self.chunks()]
                return Response(status, headers, b"".join(chunks))
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                assert headers["connection"] == "close"
                body = await self.reader.read()
            return Response(status, headers, body)

    async def head(self) -> tuple[int, dict[str, str]]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("ascii")
        first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        version, status, phrase = first.split(" ", 2)
        assert version in ("HTTP/1.0", "HTTP/1.1") and phrase
        fields = (line.split(": ", 1) for line in lines)
        headers = {name.lower(): value for name, value in fields}
        assert len(headers) == len(lines), "a header comes twice"
        if version == "HTTP/1.0":
            headers.setdefault("connection", "close")
        return int(status), headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks of the body that follows, as they arrive."""
        while True:
            line = await self.reader.readuntil(b"\r\n")
            chunk = await self.reader.readexactly(int(line, 16))
            assert await self.reader.readexactly(2) == b"\r\n"
            if not chunk:
                return
            yield chunk

    def read_on(self) -> None:
        """Resume reading on a connection made by `not_reading`."""
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]

    async def ended(self) -> bool:
        """Return whether the server has closed the connection."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read(1) == b""


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def not_reading(port: int) -> AsyncIterator[Wire]:
    """Open a connection with a small receive buffer that reads nothing until `read_on`."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LITTLE_ROOM)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=client)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """Return a whole request. `_` in a header's name stands for `-`."""
    given = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def get(port: int, path: str, **headers: str) -> Response:
    async with connected(port) as wire:
        await wire.send(request("GET", path, **headers))
        return await wire.response()


async def post(port: int, path: str, content: object, **headers: str) -> Response:
    async with connected(port) as wire:
        await wire.post(path, content, **headers)
        return await wire.response()


def sse_events(stream: bytes) -> list[Any]:
    """Return the events of a stream of server-sent events.

    Each event must be exactly `data: JSON` and a blank line, with [DONE] at the end.
    """
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b""), stream[-200:]
    for event in events:
        assert event.startswith(b"data: {") and b"\n" not in event, event
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


class Pipe(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False


class Client(BaseProtocol):
    """A connection as aiohttp sees it. Its client reads unless writing is paused."""

    ssl_context = peername = sockname = None

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.pipe = Pipe()
        self.connection_made(self.pipe)

    @property
    def written(self) -> bytes:
        return self.pipe.written

    def request(self, body: bytes = b"") -> HttpRequest:
        """Return a POST request with JSON."""
        headers = CIMultiDictProxy(CIMultiDict({"content-type": "application/json"}))
        message = RawRequestMessage(
            "POST", "/", HttpVersion11, headers, (), False, None, False, False, URL("/")
        )
        loop = asyncio.get_running_loop()
        writer = StreamWriter(self, loop)
        made = HttpRequest(Mock(reusable=True), message, EMPTY_PAYLOAD, self, writer, Mock(), loop)
        made.body = body
        return made
