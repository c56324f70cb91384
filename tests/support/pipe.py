"""A request without a server: its client is a connection that keeps what is written to it."""

import asyncio
from typing import Any
from unittest.mock import Mock

from aiohttp import EMPTY_PAYLOAD, HttpVersion11
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import StreamWriter
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from api.http.request import HttpRequest


class Pipe(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False


class Client(BaseProtocol):
    """A connection as aiohttp has it, whose client reads unless its writing is paused."""

    ssl_context = peername = sockname = None

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.pipe = Pipe()
        self.connection_made(self.pipe)

    @property
    def written(self) -> bytes:
        return self.pipe.written

    def request(self, body: bytes = b"") -> HttpRequest:
        """A POST of JSON."""
        headers = CIMultiDictProxy(CIMultiDict({"content-type": "application/json"}))
        message = RawRequestMessage(
            "POST", "/", HttpVersion11, headers, (), False, None, False, False, URL("/")
        )
        loop = asyncio.get_running_loop()
        writer = StreamWriter(self, loop)
        made = HttpRequest(Mock(goes_on=True), message, EMPTY_PAYLOAD, self, writer, Mock(), loop)
        made.body = body
        return made
