"""One request as its handler sees it: aiohttp's request, with the connection's HttpAcceptor."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web

from api.http.acceptor import HttpAcceptor
from api.http.shared import HttpPeer


class HttpRequest(web.BaseRequest):
    """An HTTP request.

    Its whole body has arrived before its handler is called, and can be taken once.
    """

    def __init__(self, door: HttpAcceptor, *parts: Any) -> None:
        """
        Args:
            parts: constructor arguments of aiohttp's request.
        """
        super().__init__(*parts)
        self.door = door
        # As sent, without the query, so that access checks and routing read the same path.
        self.route = self.rel_url.raw_path
        self.answer_headers: tuple[tuple[str, str], ...] = ()  # added to any response
        self.body = b""

    @property
    def keep_alive(self) -> bool:
        """Return whether the connection stays open after the response.

        Evaluated when its head is written.
        """
        return super().keep_alive and self.door.goes_on

    @property
    def peer(self) -> HttpPeer:
        return self.door.peer

    def header(self, name: str) -> str:
        """Return a header's value, "" if absent.

        Bytes that are not UTF-8 are read as latin-1, so that the value can be sent again.
        """
        value = self.headers.get(name, "")
        if value.isascii():
            return value
        sent = value.encode("utf-8", "surrogateescape")  # as aiohttp has decoded it
        try:
            return sent.decode()
        except UnicodeDecodeError:
            return sent.decode("latin-1")

    def take_body(self) -> bytes:
        """Return the body and release it to the caller.

        It need not be held until the response ends.
        """
        body, self.body = self.body, b""
        self.door.body_taken()
        return body


Handler: TypeAlias = Callable[[HttpRequest], Awaitable[web.StreamResponse]]
# Returns a response that replaces the handler's, before the body is read, or None.
Check: TypeAlias = Callable[[HttpRequest], web.Response | None]
