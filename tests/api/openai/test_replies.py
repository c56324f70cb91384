"""A streamed answer takes pieces at once while its client reads, and none while it does not."""

import asyncio

import pytest

from api.dialect.events import EndpointReply, RequestOrigin
from api.openai.completions import CompletionsEndpoint
from api.requests.answer import OutputChunk
from tests.support.http_client import Client


@pytest.fixture
async def client() -> Client:
    return Client()


@pytest.fixture
async def reply(client: Client) -> EndpointReply:
    dialect = CompletionsEndpoint(ignore_unknown=False)
    asked = dialect.read(b'{"prompt": "x", "stream": true}')
    return asked.reply(RequestOrigin("id", "m", 0), client.request(), ())


async def test_a_client_that_reads_gets_what_is_offered_at_once(
    client: Client, reply: EndpointReply
) -> None:
    assert reply.offer(0, OutputChunk("one", (1,)))
    assert b'"text":"one"' in client.written


async def test_of_what_is_offered_to_a_slow_client_nothing_is_written(
    client: Client, reply: EndpointReply
) -> None:
    client.pause_writing()
    assert not reply.offer(0, OutputChunk("one", (1,)))
    assert not client.written


async def test_what_is_offered_to_a_client_that_has_gone_goes_nowhere(
    client: Client, reply: EndpointReply
) -> None:
    client.connection_lost(None)
    assert reply.offer(0, OutputChunk("one", (1,)))
    assert not client.written


async def test_half_a_character_makes_no_event_but_the_first(
    client: Client, reply: EndpointReply
) -> None:
    assert reply.offer(0, OutputChunk("", (1,)))
    assert client.written.count(b"data: ") == 1
    assert reply.offer(0, OutputChunk("", (2,)))
    assert client.written.count(b"data: ") == 1


async def test_who_writes_to_a_slow_client_waits_until_it_reads(
    client: Client, reply: EndpointReply
) -> None:
    client.pause_writing()
    writing = asyncio.create_task(reply.write(0, "id", OutputChunk("one", (1,))))
    await asyncio.sleep(0)
    assert b'"text":"one"' in client.written
    assert not writing.done()
    client.resume_writing()
    await writing
