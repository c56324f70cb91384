"""HTTP itself: order, limits, deadlines and ends of connections, independent of the content."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from common.errors import ConfigError
from tests.api.http.http_site import Site, site
from tests.api.rig import collect, eventually
from tests.support.network.http_client import Wire, connected, get, post, request

CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_one_connection_serves_many_requests(served):
    async with connected(served.port) as wire:
        for body in (b"one", b"", b"three" * 100_000):
            await wire.post("/echo", body)
            answer = await wire.response()
            assert (answer.status, answer.body) == (200, body)
        assert answer.headers["date"].endswith(" GMT")
        assert "connection" not in answer.headers
    await eventually(lambda: served.metric("baton_http_connections") == 0)
    assert served.metric("baton_http_responses_total", status="200") == 3


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_request_may_arrive_in_pieces_of_any_size(served, wire, size):
    whole = (
        b"POST /echo?query HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n4;extension=1\r\ndefg\r\n0\r\nTrailer: x\r\n\r\n"
    )
    for start in range(0, len(whole), size):
        await wire.send(whole[start : start + size])
    assert (await wire.response()).body == b"abcdefg"


async def test_a_content_length_may_have_leading_zeros(served, wire):
    length = b"0" * 5000 + b"5"
    await wire.send(
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: " + length + b"\r\n\r\nhello"
    )
    assert (await wire.response()).body == b"hello"


async def test_a_trailer_is_not_treated_as_a_header(served, wire):
    for headers, trailers, reported in (
        (b"Name: x\r\n", b"", b"x"),
        (b"", b"Name: x\r\n", b"none"),
    ):
        start = b"POST /name HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        await wire.send(start + headers + b"\r\n0\r\n" + trailers + b"\r\n")
        assert (await wire.response()).body == reported


@pytest.mark.parametrize("sent", [b"na\xc3\xafve", b"na\xefve"], ids=["UTF-8", "latin-1"])
async def test_any_byte_of_a_header_is_preserved(served, wire, sent):
    await wire.send(b"POST /name HTTP/1.1\r\nhost: x\r\nname: " + sent + b"\r\n\r\n")
    assert (await wire.response()).body.decode() == "naïve"


async def test_pipelined_requests_are_answered_in_order(served, wire):
    first, *rest = [request("POST", "/echo", b"%d" % number) for number in range(6)]
    await wire.send(request("GET", "/hold") + first)
    await served.started.wait()
    await wire.send(b"".join(rest))
    served.proceed.set()
    assert (await wire.response()).body == b"held"
    for number in range(6):
        assert (await wire.response()).body == b"%d" % number


async def test_too_much_pipelined_data_ends_the_connection_after_the_first_response(caplog):
    caplog.set_level(logging.INFO)
    async with site(max_ahead_bytes=1000) as served, connected(served.port) as wire:
        await wire.send(request("GET", "/hold"))
        await served.started.wait()
        await wire.send(request("POST", "/echo", b"x" * 10_000))
        await eventually(lambda: "client connection rejected" in caplog.text)
        served.proceed.set()
        answer = await wire.response()
        assert (answer.body, answer.headers["connection"]) == (b"held", "close")
        assert await wire.ended()


async def test_any_number_of_pipelined_requests_is_answered_in_order():
    async with site(max_ahead_bytes=1000) as served, connected(served.port) as wire:
        await wire.send(b"".join(request("POST", "/echo", b"%d" % number) for number in range(500)))
        for number in range(500):
            assert (await wire.response()).body == b"%d" % number


async def test_a_client_that_expects_100_continue_gets_it(served, wire):
    whole = request("POST", "/echo", b"body", expect="100-continue")
    await wire.send(whole[:-4])
    assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await wire.send(b"body")
    assert (await wire.response()).body == b"body"


async def test_head_is_get_without_the_body(served, wire):
    await wire.send(request("HEAD", "/below/x") + request("GET", "/below/y"))
    answer = await wire.response(to_head=True)
    assert (answer.status, answer.headers["content-length"]) == (200, "8")
    assert (await wire.response()).body == b"/below/y"


async def test_an_unknown_path_is_404_and_an_unknown_method_405(served):
    answer = await get(served.port, "/echo")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert "/echo accepts POST, not GET" in answer.error["message"]
    answer = await get(served.port, "/nothing?here")
    assert (answer.status, answer.error["type"]) == (404, "invalid_request_error")
    assert "/nothing" in answer.error["message"]


@pytest.mark.parametrize(
    "head, connection, ends",
    [
        ("HTTP/1.1\r\nHost: x\r\nConnection: close", "close", True),
        ("HTTP/1.1\r\nHost: x", None, False),
        ("HTTP/1.0", "close", True),
        ("HTTP/1.0\r\nConnection: keep-alive", "keep-alive", False),
    ],
)
async def test_the_client_decides_whether_its_connection_is_kept_alive(
    served, wire, head, connection, ends
):
    await wire.send(f"GET /below/ {head}\r\n\r\n".encode())
    answer = await wire.response()
    assert answer.headers.get("connection") == connection
    if ends:
        assert await wire.ended()
    else:
        await wire.send(request("GET", "/below/again"))
        assert (await wire.response()).body == b"/below/again"


async def test_a_stream_to_an_http_1_0_client_ends_with_its_connection(served, wire):
    served.pieces = [b"one ", b"two "]
    await wire.send(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    answer = await wire.response()
    assert "transfer-encoding" not in answer.headers
    assert answer.body == b"one two end"


@pytest.mark.parametrize(
    "sent",
    [
        b"not http at all\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 3\r\n\r\n"),
        CHUNKED + b"zz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_an_invalid_request_gets_400_and_ends_the_connection(served, wire, sent):
    await wire.send(sent)
    answer = await wire.response()
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert answer.error["type"] == "invalid_request_error"
    assert await wire.ended()
    assert (await post(served.port, "/echo", b"others go on")).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nname: " + b"x" * 3000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 200,
    ],
    ids=["path", "one header", "many headers", "trailers"],
)
async def test_too_long_a_head_is_rejected(sent):
    async with site(max_line_bytes=2000) as served, connected(served.port) as wire:
        await wire.send(sent)
        assert (await wire.response()).status == 400
        assert await wire.ended()


@pytest.mark.parametrize(
    "wrong", [b"zz\r\n", b"0\r\n" + b"a: b\r\n" * 200], ids=["size", "trailers"]
)
async def test_an_invalid_body_header_is_rejected_at_once(served, wire, wrong):
    await wire.send(CHUNKED)
    await eventually(lambda: served.shared.num_arriving > 0)
    await wire.send(wrong)
    assert (await wire.response()).status == 400
    assert await wire.ended()


async def test_too_long_a_body_is_413_before_it_is_read():
    async with site(max_body_bytes=1000) as served:
        async with connected(served.port) as wire:
            head = request("POST", "/echo", b"x" * 1001, expect="100-continue")[:-1001]
            await wire.send(head)
            answer = await wire.response()
            assert answer.status == 413
            assert "1000 bytes" in answer.error["message"]
        assert (await post(served.port, "/echo", b"x" * 1000)).status == 200


async def test_a_client_that_sends_too_long_a_body_can_read_the_rejection():
    async with site(max_body_bytes=1000) as served, connected(served.port) as wire:
        await wire.post("/echo", b"x" * 10_000_000)
        assert (await wire.response()).status == 413


async def test_an_endless_chunked_body_is_413():
    async with site(max_body_bytes=100_000) as served, connected(served.port) as wire:
        await wire.send(CHUNKED)
        for _ in range(200):
            await wire.send(b"400\r\n" + 1024 * b"x" + b"\r\n")
        assert (await wire.response()).status == 413


async def test_a_chunked_body_slightly_over_the_limit_is_413():
    async with site(max_body_bytes=1000) as served, connected(served.port) as wire:
        for length, status in ((1000, 200), (1001, 413)):
            await wire.send(CHUNKED)
            await wire.send(b"%x\r\n%b\r\n0\r\n\r\n" % (length, length * b"x"))
            assert (await wire.response()).status == status


@pytest.mark.parametrize(
    "endless", [b"\r\n", CHUNKED + b"1;x="], ids=["blank lines", "a chunk's extension"]
)
async def test_an_invalid_chunked_body_ends_with_an_error(endless):
    async with site(max_body_bytes=1000) as served, connected(served.port) as wire:
        await wire.send(endless)
        filling = b"\r\n" if endless == b"\r\n" else b"xx"
        await wire.send(40_000 * filling)
        assert (await wire.response()).status == 413
        assert await wire.ended()


async def test_a_request_that_does_not_arrive_in_time_is_408():
    async with site(receive_s=0.1) as served, connected(served.port) as wire:
        await wire.send(request("POST", "/echo", b"never sent")[:-1])
        answer = await wire.response()
        assert (answer.status, "0.1 s" in answer.error["message"]) == (408, True)
        assert await wire.ended()


async def test_a_pipelined_request_has_the_same_deadline():
    async with site(receive_s=1.0) as served, connected(served.port) as wire:
        whole = request("POST", "/echo", b"body")
        await wire.send(whole + whole[:-1])
        assert (await wire.response()).body == b"body"
        assert (await wire.response()).status == 408


async def test_slowly_arriving_bytes_do_not_extend_the_deadline():
    async with site(receive_s=0.2) as served, connected(served.port) as wire:
        trickling = asyncio.create_task(_trickle(wire))
        assert (await wire.response()).status == 408
        trickling.cancel()


async def _trickle(wire: Wire) -> None:
    await wire.send(b"GET / HTTP/1.1\r\nhost: x\r\nname: ")
    while True:
        await wire.send(b"x")
        await asyncio.sleep(0.02)


async def test_an_idle_connection_is_closed_after_its_timeout():
    async with site(idle_s=1.0) as served:
        async with connected(served.port) as wire:
            assert await wire.ended()
        async with connected(served.port) as wire:
            await wire.post("/echo", b"x")
            assert (await wire.response()).status == 200
            assert await wire.ended()


async def test_a_response_that_takes_longer_than_any_deadline_is_completed():
    async with site(idle_s=1.0, receive_s=1.0) as served, connected(served.port) as wire:
        await wire.send(request("GET", "/hold"))
        await served.started.wait()
        async with connected(served.port) as other:
            assert await other.ended()  # so the deadline has expired
        served.proceed.set()
        assert (await wire.response()).body == b"held"


async def test_connections_over_the_limit_get_a_retry_time():
    async with site(max_connections=1, linger_s=0.05) as served:
        async with connected(served.port) as first:
            await first.send(request("GET", "/hold"))
            await served.started.wait()
            async with connected(served.port) as second:
                answer = await second.response()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert answer.error["type"] == "server_error"
            served.proceed.set()
            assert (await first.response()).status == 200


async def test_idle_connections_of_one_address_leave_room_for_others():
    async with site(max_connections=64) as served, AsyncExitStack() as stack:

        async def connect() -> Wire:
            return await stack.enter_async_context(connected(served.port))

        used = await connect()
        await used.post("/echo", b"x")
        assert (await used.response()).status == 200
        holding = await connect()
        await holding.send(request("GET", "/hold"))
        await served.started.wait()
        idle = [await connect() for _ in range(300)]
        # Of the 56 that one address can have, those idle for the longest time have been closed.
        assert await used.ended()
        for wire in idle[: 300 - 55]:
            assert await wire.ended()
        for wire in idle[300 - 55 :]:
            await wire.post("/echo", b"still here")
            assert (await wire.response()).body == b"still here"
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", served.port, local_addr=("127.0.0.2", 0)
        )
        other = Wire(reader, writer)
        await other.post("/echo", b"from elsewhere")
        assert (await other.response()).body == b"from elsewhere"
        writer.close()
        served.proceed.set()
        assert (await holding.response()).body == b"held"


async def test_the_size_of_all_incomplete_bodies_is_limited():
    async with site(max_arriving_bytes=100_000) as served:
        async with connected(served.port) as first:
            await first.send(request("POST", "/echo", b"x" * 80_000)[:-1])
            async with connected(served.port) as second:
                await second.send(request("POST", "/echo", b"x" * 80_000)[:-1])
                assert (await second.response()).status == 503
            await first.send(b"x")
            assert (await first.response()).status == 200
            await first.send(request("POST", "/echo", b"x" * 80_000)[:-1])
        # An incomplete body whose client has gone does not count any more, either.
        await eventually(lambda: served.metric("baton_http_connections") == 0)
        async with connected(served.port) as third:
            await third.send(request("POST", "/echo", b"x" * 80_000)[:-1])
            assert (await post(served.port, "/echo", b"x")).status == 200  # so it has been read
            await third.send(b"x")
            assert (await third.response()).status == 200


async def test_an_internal_error_is_500_and_logged(served, wire, caplog):
    with caplog.at_level(logging.ERROR):
        await wire.send(request("GET", "/fails"))
        answer = await wire.response()
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert "ValueError: a bug" in caplog.text
    assert "a bug" not in answer.error["message"]
    await wire.post("/echo", b"x")
    assert (await wire.response()).status == 200


async def test_an_internal_error_during_a_response_cuts_it_off(served, wire):
    await wire.send(request("GET", "/fails-late"))
    with pytest.raises(asyncio.IncompleteReadError):
        await wire.response()


async def test_draining_closes_idle_connections_and_completes_responses(served):
    async with (
        connected(served.port) as idle,
        connected(served.port) as busy,
        connected(served.port) as fresh,
        connected(served.port) as unused,
    ):
        await idle.post("/echo", b"x")
        await idle.response()
        await busy.send(request("GET", "/hold"))
        await served.started.wait()
        await eventually(lambda: served.metric("baton_http_connections") == 4)
        served.server.drain()
        assert await idle.ended()
        await fresh.post("/echo", b"on its way")
        assert (await fresh.response()).body == b"on its way"
        assert await fresh.ended() and await unused.ended()
        answer = await post(served.port, "/echo", b"still here")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        served.proceed.set()
        assert (await busy.response()).body == b"held"
        assert await busy.ended()


async def test_a_server_that_stops_listening_serves_clients_that_have_connected(served):
    """Seen failing if the listener is closed at once: the kernel resets those connections."""
    clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
    for client in clients:  # the server uses this event loop, which has accepted none of them yet
        client.sendall(request("POST", "/echo", b"x"))
    served.server.stop_listening()
    served.server.drain()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", served.port)
    for client in clients:
        reader, writer = await asyncio.open_connection(sock=client)
        answer = await Wire(reader, writer).response()
        assert (answer.status, answer.body, answer.headers["connection"]) == (200, b"x", "close")
        writer.close()


async def test_stopping_waits_for_responses_up_to_its_limit(served, wire):
    await wire.send(request("GET", "/hold"))
    await served.started.wait()
    await served.server.stop(0.05)
    assert await wire.ended()
    await served.cancelled.wait()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", served.port)


def tcp_connections() -> Iterator[socket.socket]:
    """Return every TCP connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since
            continue
        with one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                try:
                    one.getpeername()
                except OSError:  # a listening or ended socket
                    continue
                yield one


async def test_every_accepted_socket_has_small_buffers_and_detects_a_lost_peer(served, wire):
    await wire.post("/echo", b"x")
    await wire.response()
    client = wire.writer.get_extra_info("sockname")
    found = 0
    for accepted in tcp_connections():
        if accepted.getpeername() != client:
            continue
        found += 1
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 64 << 10
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silent_s, probe_s, probes = (
            accepted.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert silent_s + probes * probe_s <= 30
    assert found == 1


async def test_every_tcp_connection_of_a_router_has_nodelay(client, node, router):
    call = client.generate("x")
    await node.complete([66])
    await collect(call)
    assert (await get(router.http_port, "/health")).status == 200
    async with connected(router.http_port) as wire:
        await wire.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await wire.response()
        ours = {"http": router.http_port, "grpc": router.port}
        node_port = int(node.address.rpartition(":")[2])
        seen = set()
        for connection in tcp_connections():
            local, remote = connection.getsockname()[1], connection.getpeername()[1]
            ends = {name for name, port in ours.items() if port == local}
            ends |= {"node"} if remote == node_port else set()
            for end in ends:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), end
            seen |= ends
    assert seen == {"http", "grpc", "node"}


async def test_a_port_in_use_is_a_clear_error(served):
    with pytest.raises(ConfigError, match=rf"--http-port: .*:{served.port}"):
        await Site().server.start("127.0.0.1", served.port)
