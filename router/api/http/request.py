"""One request, and what it can get instead of an answer of its handler's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """The other end of one connection. No two are equal, while addresses can be: a router that
    listens on two of its own can be called from one port twice."""

    host: str
    address: str  # host:port


NOBODY = Peer("", "")


class Head(msgspec.Struct, frozen=True):
    """What there is of a request before its body."""

    method: str
    path: str  # as sent, without the query
    headers: Mapping[bytes, bytes]  # names in lower case; of a repeated one the last
    peer: Peer


class Refused(msgspec.Struct, frozen=True):
    """A whole answer, which a request gets instead of its handler's."""

    status: int
    body: bytes  # JSON
    headers: Sequence[tuple[str, str]] = ()


# Why a request is refused before its body is read, or None.
Check = Callable[[Head], Refused | None]


class Request:
    """One request with its whole body, which is given away once."""

    __slots__ = (
        *("_body", "_on_taken", "headers", "keep_alive", "method", "path", "peer", "refused"),
        "takes_chunks",
    )

    def __init__(
        self,
        method: str,
        path: str,
        headers: Mapping[bytes, bytes],
        body: bytes,
        *,
        takes_chunks: bool,
        keep_alive: bool,
        peer: Peer = NOBODY,
        refused: Refused | None = None,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            method, path, headers, peer: as of Head.
            takes_chunks: whether its client understands an answer in chunks: HTTP/1.1.
            on_taken: called when the body is taken.
        """
        self.method = method
        self.path = path
        self.headers = headers
        self.takes_chunks = takes_chunks
        self.keep_alive = keep_alive
        self.peer = peer
        self.refused = refused
        self._body = body
        self._on_taken = on_taken

    @property
    def num_body_bytes(self) -> int:
        """0 once it has been taken."""
        return len(self._body)

    def take_body(self) -> bytes:
        """The body is the caller's from now on, and nobody else's: what has been read of it need
        not be held until the answer ends."""
        body, self._body = self._body, b""
        self._on_taken()
        return body


class BadRequest(Exception):
    """What a client sent is no request, or more than is taken. Nothing after it can be read."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
