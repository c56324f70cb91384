"""Reads a request's body, within limits that hold before it is much work."""

from aiohttp import EMPTY_PAYLOAD, HttpVersion10, HttpVersion11

from api.http.request import Request

# Every piece of a body costs the same work, whatever is in it: so many may be small.
_SMALL_BYTES, _MAX_SMALL = 64, 1000


class BadRequest(Exception):
    """What a client sent is no request, or more than is taken. Nothing after it can be read."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


async def whole_body(request: Request, max_bytes: int) -> bytes:
    """Waits until all of it is here.

    Raises:
        BadRequest: it is too long, which is said before it comes where its client tells its
            length, or comes in too many pieces.
    """
    if request.version not in (HttpVersion11, HttpVersion10):
        raise BadRequest(400, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    content = request.content
    if content is EMPTY_PAYLOAD:
        return b""
    if content.is_eof() and content.total_bytes <= max_bytes:
        return content.read_nowait()
    if _num_told(request) > max_bytes:
        raise _too_long(max_bytes)
    if request.header("expect").lower() == "100-continue":
        request.door.ask_for_body()
    body = bytearray()
    num_pieces = 0
    async for piece, _ in content.iter_chunks():
        body += piece
        num_pieces += 1
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
        if num_pieces > _MAX_SMALL + len(body) // _SMALL_BYTES:
            raise BadRequest(400, "a body in so many small pieces is not taken")
    return bytes(body)


def _num_told(request: Request) -> int:
    # The parser has found it to be a number, but Python reads no more than 4300 digits of one.
    return int(request.header("content-length").lstrip("0")[:20] or "0")


def _too_long(max_bytes: int) -> BadRequest:
    return BadRequest(413, f"the body of a request has at most {max_bytes} bytes")
