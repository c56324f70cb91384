"""A streamed answer takes pieces at once while its client reads, and none while it does not."""

import asyncio

import pytest

from router.api.http.request import Request
from router.api.http.responder import Responder
from router.api.openai.completions import Completions
from router.api.openai.replies import Origin, StreamedReply
from router.requests.answer import Piece
from tests.support.pipe import Pipe

REQUEST = Request("POST", "/", {}, b"", takes_chunks=True, keep_alive=True)


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


@pytest.fixture
def readable() -> asyncio.Event:
    """Set while the client reads."""
    return asyncio.Event()


@pytest.fixture
def reply(pipe: Pipe, readable: asyncio.Event) -> StreamedReply:
    responder = Responder(pipe, readable, REQUEST, date="", keep_alive=True)
    dialect = Completions()
    asked = dialect.read(b'{"prompt": "x", "stream": true}')
    return StreamedReply(dialect, asked, Origin("id", "m", 0), responder, ())


def test_a_client_that_reads_gets_what_is_offered_at_once(
    pipe: Pipe, readable: asyncio.Event, reply: StreamedReply
) -> None:
    readable.set()
    assert reply.offer(0, Piece("one", (1,)))
    assert b'"text":"one"' in pipe.written


def test_of_what_is_offered_to_a_slow_client_nothing_is_written(
    pipe: Pipe, readable: asyncio.Event, reply: StreamedReply
) -> None:
    assert not reply.offer(0, Piece("one", (1,)))
    assert not pipe.written


def test_half_a_character_makes_no_event_but_the_first(
    pipe: Pipe, readable: asyncio.Event, reply: StreamedReply
) -> None:
    readable.set()
    assert reply.offer(0, Piece("", (1,)))
    assert pipe.written.count(b"data: ") == 1
    assert reply.offer(0, Piece("", (2,)))
    assert pipe.written.count(b"data: ") == 1


async def test_who_writes_to_a_slow_client_waits_until_it_reads(
    pipe: Pipe, readable: asyncio.Event, reply: StreamedReply
) -> None:
    writing = asyncio.create_task(reply.write(0, "id", Piece("one", (1,))))
    await asyncio.sleep(0)
    assert b'"text":"one"' in pipe.written
    assert not writing.done()
    readable.set()
    await writing
