"""One request as its handler sees it: aiohttp's, and the door that it came through."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web

from api.http.acceptor import Door
from api.http.shared import Peer


class Request(web.BaseRequest):
    """Its whole body is here before its handler is called, and is given away once."""

    def __init__(self, door: Door, *parts: Any) -> None:
        """
        Args:
            parts: what aiohttp makes its requests of.
        """
        super().__init__(*parts)
        self.door = door
        # As sent, without the query: who checks a path and who answers there read the same.
        self.route = self.rel_url.raw_path
        self.answer_headers: tuple[tuple[str, str], ...] = ()  # of any answer, besides its own
        self.body = b""

    @property
    def keep_alive(self) -> bool:
        """Whether the connection can go on after the answer; asked when its head is written."""
        return super().keep_alive and self.door.goes_on

    @property
    def peer(self) -> Peer:
        return self.door.peer

    def header(self, name: str) -> str:
        """Its value; "" of none. What is not UTF-8 is read as latin-1: it can be sent again."""
        value = self.headers.get(name, "")
        if value.isascii():
            return value
        sent = value.encode("utf-8", "surrogateescape")  # as aiohttp has decoded it
        try:
            return sent.decode()
        except UnicodeDecodeError:
            return sent.decode("latin-1")

    def take_body(self) -> bytes:
        """The body is the caller's from now on, and nobody else's: what has been read of it need
        not be held until the answer ends."""
        body, self.body = self.body, b""
        self.door.body_taken()
        return body


Handler: TypeAlias = Callable[[Request], Awaitable[web.StreamResponse]]
# An answer that a request gets before its body is read, or None.
Check: TypeAlias = Callable[[Request], web.Response | None]
