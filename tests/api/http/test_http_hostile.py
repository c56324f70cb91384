"""Clients that try to cost the router more than themselves: all data held for them is limited."""

import asyncio
import gc
import logging
import math
import time
import tracemalloc

import pytest
from aiohttp import web

from api.dialect.problems import ApiError
from api.http.messages import HttpRequest
from tests.api.http.http_site import site
from tests.api.rig import eventually
from tests.support.network.http_client import WAIT_S, connected, get, not_reading, post, request

CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

# Data held for one client -------------------------------------------------------------------------


async def test_a_client_that_reads_no_responses_gets_no_more_of_them():
    num_asked = 100
    async with site() as served, not_reading(served.port) as wire:
        served.whole = b"x" * 500_000
        for _ in range(num_asked // 10):
            await wire.send(10 * request("GET", "/whole"))
            assert (await post(served.port, "/echo", b"others")).status == 200
        answered = served.metric("baton_http_responses_total", status="200")
        assert 0 < answered - num_asked // 10 < 10
        wire.read_on()
        for _ in range(num_asked):
            assert (await wire.response()).body == served.whole


async def test_little_of_an_unread_stream_is_held():
    piece, num_pieces = b"x" * 1000, 20_000
    async with site() as served, not_reading(served.port) as wire:
        served.pieces = [piece] * num_pieces
        await wire.send(request("GET", "/stream"))
        await eventually(lambda: served.num_sent > 0)
        assert (await post(served.port, "/echo", b"others")).status == 200
        assert served.num_sent * len(piece) < 1 << 20
        wire.read_on()
        assert (await wire.response()).body == piece * num_pieces + b"end"


async def test_a_body_in_small_chunks_takes_no_more_memory_than_is_counted(served, wire):
    chunks = (b"40\r\n" + 64 * b"x" + b"\r\n") * 1000
    await wire.send(CHUNKED)
    await eventually(lambda: served.shared.num_arriving > 0)
    tracemalloc.start()
    try:
        for _ in range(10):
            await wire.send(chunks)
        await eventually(lambda: served.shared.num_arriving > 10 * len(chunks))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < served.shared.num_arriving + (256 << 10)


async def test_a_body_in_tiny_chunks_is_rejected_before_it_causes_much_work(served, wire):
    await wire.send(CHUNKED)
    await wire.send(b"2\r\nab\r\n" * 2000)
    answer = await wire.response()
    assert (answer.status, "small chunks" in answer.error["message"]) == (400, True)
    assert await wire.ended()


async def test_few_of_many_pipelined_requests_are_read():
    def num_read() -> int:
        return sum(type(each).__name__ == "RawRequestMessage" for each in gc.get_objects())

    async with site(max_ahead_bytes=1 << 20) as served, connected(served.port) as wire:
        before = num_read()
        await wire.send(request("GET", "/hold") + 3000 * request("GET", "/whole"))
        await served.started.wait()
        await wire.send(3000 * request("GET", "/whole"))
        await eventually(lambda: served.shared.num_arriving > 100_000)
        assert 0 < num_read() - before < 100


async def test_a_body_counts_exactly_until_the_handler_has_read_it():
    async with site(max_arriving_bytes=100_000) as served:
        async with connected(served.port) as first, connected(served.port) as second:
            await first.send(request("POST", "/hold", b"x" * 80_000))
            await served.started.wait()
            assert served.shared.num_arriving == 0
            await second.post("/echo", b"y" * 80_000)
            assert (await second.response()).status == 200
            async with connected(served.port) as third:
                await third.send(request("GET", "/hold", b"never taken"))
                await eventually(lambda: served.shared.num_arriving == len(b"never taken"))
                await third.send(b"x")
                await eventually(lambda: served.shared.num_arriving == len(b"never takenx"))
            await eventually(lambda: served.shared.num_arriving == 0)
            await first.send(b"z" * 1000)
            await eventually(lambda: served.shared.num_arriving == 1000)
            served.proceed.set()
            assert (await first.response()).body == b"held"
    await eventually(lambda: served.shared.num_arriving == 0)


async def test_no_data_of_a_disconnected_client_is_held(served):
    part = request("POST", "/echo", b"x" * 5_000_000)[:-1]
    gc.disable()  # nothing may have to wait for it
    tracemalloc.start()
    try:
        async with connected(served.port) as wire:
            await wire.send(part)
            await eventually(lambda: served.shared.num_arriving >= 4_999_999)
        await eventually(lambda: not served.shared.members)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert served.shared.num_arriving == 0
    assert held < 1_000_000


# Clients that disconnect --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at_once, ahead",
    [
        (b"", b""),
        (b"", b"G"),
        (b"", request("GET", "/whole")),
        (b"", 500 * request("GET", "/whole")),
        (b"", b"\r\n" * 10_000),
        (b"", b"x" * (16 << 20)),
        # Seen failing with a connection that stops reading while aiohttp accepts no more data.
        (500 * request("GET", "/whole"), b""),
    ],
    ids=[
        "nothing",
        "byte",
        "request",
        "requests",
        "blank lines",
        "more than any buffer",
        "at once",
    ],
)
async def test_a_disconnect_is_detected_whatever_follows_the_request(served, at_once, ahead):
    async with connected(served.port) as wire:
        await wire.send(request("GET", "/hold") + at_once)
        await served.started.wait()
        async with asyncio.timeout(WAIT_S):
            await wire.send(ahead)
    async with asyncio.timeout(WAIT_S):
        await served.cancelled.wait()
    await eventually(lambda: not served.shared.members)


async def test_a_client_that_leaves_a_response_unread_for_too_long_is_disconnected(caplog):
    caplog.set_level(logging.INFO)
    async with site(unread_s=0.1) as served, not_reading(served.port) as wire:
        served.pieces = [b"x" * 1000] * 20_000
        await wire.send(request("GET", "/stream"))
        async with asyncio.timeout(WAIT_S):
            await served.cancelled.wait()
        await eventually(lambda: not served.shared.members)
    assert "slow client disconnected" in caplog.text


async def test_a_client_that_reads_again_before_the_deadline_is_not_disconnected():
    async with site(unread_s=WAIT_S) as served, not_reading(served.port) as wire:
        served.pieces = [b"x" * 1000] * 20_000
        served.may_end.clear()
        await wire.send(request("GET", "/stream"))
        await eventually(lambda: served.shared.members)
        (member,) = served.shared.members
        await eventually(lambda: member.deadline < math.inf and served.num_sent > 0)
        wire.read_on()
        reading = asyncio.create_task(wire.response())
        await eventually(lambda: served.num_sent == 20_000 and member.deadline == math.inf)
        served.may_end.set()
        assert (await reading).body.endswith(b"end")


# Rejected clients ---------------------------------------------------------------------------------


def only_known(asked: HttpRequest) -> web.Response | None:
    if asked.header("authorization") == "Bearer known":
        return None
    return ApiError(401, f"{asked.peer.address} is not known at {asked.route}").response()


async def test_a_check_rejects_a_request_before_its_body_is_read():
    async with site(checks=(only_known,)) as served, connected(served.port) as wire:
        whole = request("POST", "/echo?x", b"x" * 100_000, expect="100-continue")
        await wire.send(whole[:-100_000])
        answer = await wire.response()
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.error["message"].startswith("127.0.0.1:")
        assert answer.error["message"].endswith(" is not known at /echo")
        assert answer.headers["connection"] == "close"
        assert await wire.ended()


async def test_a_client_that_sends_the_body_nevertheless_can_read_the_rejection():
    async with site(checks=(only_known,)) as served, connected(served.port) as wire:
        await wire.post("/echo", b"x" * 10_000_000)
        assert (await wire.response()).status == 401


async def test_a_connection_is_kept_after_the_rejection_of_a_complete_request():
    async with site(checks=(lambda request: None, only_known)) as served:
        async with connected(served.port) as wire:
            await wire.post("/echo", b"refused")
            assert (await wire.response()).status == 401
            await wire.post("/echo", b"taken", authorization="Bearer known")
            assert (await wire.response()).body == b"taken"
        await eventually(lambda: served.metric("baton_http_responses_total", status="401") == 1)


async def test_the_log_of_rejected_clients_is_limited(caplog):
    caplog.set_level(logging.INFO)
    begin = time.monotonic()
    async with site() as served:
        for _ in range(50):
            async with connected(served.port) as wire:
                await wire.send(b"nonsense\r\n\r\n")
                assert (await wire.response()).status == 400
        assert (await get(served.port, "/below/")).status == 200
    lines = [line for line in caplog.messages if line.startswith("client connection rejected")]
    num_intervals = 1 + (time.monotonic() - begin) // 10.0
    assert 10 <= len(lines) <= 10 * num_intervals
    assert "more_left_out_for_s" in lines[9]
