"""Reading of a request's body, within limits that apply before much work is done."""

from aiohttp import EMPTY_PAYLOAD, HttpVersion10, HttpVersion11

from api.http.request import HttpRequest

# Each piece of a body costs the same work, whatever its size. This limits the number of small ones.
_SMALL_BYTES, _MAX_SMALL = 64, 1000


class BadRequest(Exception):
    """An invalid request, or one beyond the limits.

    Nothing after it on the connection can be read.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


async def whole_body(request: HttpRequest, max_bytes: int) -> bytes:
    """Wait until the whole body has arrived, and return it.

    Raises:
        BadRequest: it is too long or comes in too many pieces. If the client sends the length, a
            body that is too long is rejected before it arrives.
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


def _num_told(request: HttpRequest) -> int:
    # The parser has checked that it is a number, but Python reads at most 4300 digits of one.
    return int(request.header("content-length").lstrip("0")[:20] or "0")


def _too_long(max_bytes: int) -> BadRequest:
    return BadRequest(413, f"the body of a request has at most {max_bytes} bytes")
