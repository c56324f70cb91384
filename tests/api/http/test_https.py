"""The router's HTTP port with TLS: handshakes, their limits, and certificates that change."""

import asyncio
import logging
import re
import socket
import ssl
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from api.http.acceptor import HttpContext, HttpLimits
from api.http.messages import HttpRequest, whole
from api.http.service import HttpServer, HttpService
from common import tls
from router.metrics import RouterMetrics
from tests.api.http.http_site import Checked
from tests.api.rig import eventually
from tests.support.network.certificates import Authority

PATIENCE_S = 60.0


@pytest.fixture
def authority():
    return Authority()


async def echo(request: HttpRequest) -> web.Response:
    return whole(200, request.take_body())


@asynccontextmanager
async def serving(config, **limits):
    """A server that echoes, and its HttpContext."""
    given = {"max_connections": 8, **limits}
    shared = HttpContext(HttpLimits(**given), lambda *_: b"{}", RouterMetrics())
    service = HttpService(shared, lambda _: echo, Checked())
    contexts = tls.server_contexts(tls.Certificates(config, "--server.tls"))
    server = HttpServer(shared, service, contexts)
    port = await server.start("127.0.0.1", 0)
    try:
        yield port, shared
    finally:
        await server.stop(1.0)


def trusting(config, *, shows=False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(config.ca))
    context.set_alpn_protocols(["h2", "http/1.1"])
    if shows:
        context.load_cert_chain(config.cert, config.key)
    return context


@asynccontextmanager
async def connected(port, context):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):  # the server was first
            await writer.wait_closed()


async def exchange(reader, writer, body: bytes = b"hello") -> bytes:
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        return await reader.readexactly(len(body))


async def test_requests_are_answered_over_tls_1_2_and_later_and_http_1_1(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config.model_copy(update={"ca": None})) as (port, shared):
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = trusting(config)
            context.minimum_version = context.maximum_version = version
            async with connected(port, context) as (reader, writer):
                assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
                for size in (0, 5, 1 << 20):
                    body = b"x" * size
                    assert await exchange(reader, writer, body) == body
                assert len(shared.members) == 1
        await eventually(lambda: not shared.members)


async def test_clients_need_a_certificate_only_if_there_is_a_ca(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config) as (port, shared):
        async with connected(port, trusting(config, shows=True)) as streams:
            assert await exchange(*streams) == b"hello"
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            # With TLS 1.3 a client learns it when it reads.
            async with connected(port, trusting(config)) as streams:
                await exchange(*streams)
        await eventually(lambda: not shared.members)


async def test_a_client_without_tls_is_disconnected_and_affects_no_other(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config) as (port, shared):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            try:
                answer = await reader.read()
            except ConnectionError:
                answer = b""
        assert b"HTTP" not in answer
        writer.close()
        await eventually(lambda: not shared.members)
        async with connected(port, trusting(config, shows=True)) as streams:
            assert await exchange(*streams) == b"hello"


async def test_a_silent_client_counts_and_is_disconnected_at_the_deadline(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config, handshake_s=1.0, tick_s=0.1, max_connections=2) as (port, shared):
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        await eventually(lambda: len(shared.members) == 2)
        await eventually(lambda: not shared.members)
        for each in silent:
            each.settimeout(PATIENCE_S)
            with suppress(ConnectionError):
                assert each.recv(1) == b""
            each.close()
        async with connected(port, trusting(config, shows=True)) as streams:
            assert await exchange(*streams) == b"hello"


async def test_a_request_sent_with_the_end_of_the_handshake_is_answered(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config.model_copy(update={"ca": None})) as (port, _):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting(config).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(1 << 16))
        client.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi")
        writer.write(outgoing.read())  # in one segment with the client's Finished
        answer = b""
        async with asyncio.timeout(PATIENCE_S):
            while not answer.endswith(b"hi"):
                incoming.write(await reader.read(1 << 16))
                try:
                    answer += client.read()
                except ssl.SSLWantReadError:
                    continue
        assert answer.startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_tls_client_counts_once(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config, max_connections=1) as (port, shared):
        async with connected(port, trusting(config, shows=True)) as streams:
            assert await exchange(*streams) == b"hello"
            assert len(shared.members) == 1


async def test_an_invalid_request_is_answered_over_tls_too(authority, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = authority.write(tmp_path)
    async with serving(config.model_copy(update={"ca": None})) as (port, shared):
        async with connected(port, trusting(config)) as (reader, writer):
            writer.write(b"nonsense\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
        await eventually(lambda: not shared.members)
    assert re.search(r"client connection rejected peer=127\.0\.0\.1:\d+ ", caplog.text)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_new_certificates_apply_from_the_next_handshake_on(authority, tmp_path):
    config = authority.write(tmp_path)
    before = trusting(config, shows=True)
    async with serving(config) as (port, _):
        async with connected(port, before) as old:
            assert await exchange(*old) == b"hello"
            Authority().write(tmp_path)
            async with connected(port, trusting(config, shows=True)) as new:
                assert await exchange(*new) == b"hello"
            with pytest.raises(ssl.SSLCertVerificationError):
                async with connected(port, before):
                    pass
            assert await exchange(*old) == b"hello"
