"""The router's HTTP port with TLS: handshakes, their limits, and certificates that change."""

import asyncio
import logging
import re
import socket
import ssl
from contextlib import asynccontextmanager, suppress

import pytest

from common import tls
from tests.api.http.http_site import site
from tests.api.rig import eventually
from tests.support.network.certificates import Authority
from tests.support.network.http_client import WAIT_S, Wire, request


@pytest.fixture
def authority():
    return Authority()


def serving(config, **limits):
    contexts = tls.server_contexts(tls.Certificates(config, "--server.tls"))
    return site(tls_context=contexts, **limits)


def trusting(config, *, shows=False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(config.ca))
    context.set_alpn_protocols(["h2", "http/1.1"])
    if shows:
        context.load_cert_chain(config.cert, config.key)
    return context


@asynccontextmanager
async def connected(served, context):
    wire = Wire(*await asyncio.open_connection("127.0.0.1", served.port, ssl=context))
    try:
        yield wire
    finally:
        wire.writer.close()
        with suppress(OSError):  # the server was first
            await wire.writer.wait_closed()


async def is_answered(wire, body: bytes = b"hello") -> bool:
    await wire.post("/echo", body)
    return (await wire.response()).body == body


async def test_requests_are_answered_over_tls_1_2_and_later_and_http_1_1(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config.model_copy(update={"ca": None})) as served:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = trusting(config)
            context.minimum_version = context.maximum_version = version
            async with connected(served, context) as wire:
                protocol = wire.writer.get_extra_info("ssl_object").selected_alpn_protocol()
                assert protocol == "http/1.1"
                for size in (0, 5, 1 << 20):
                    assert await is_answered(wire, b"x" * size)
                assert len(served.shared.members) == 1
        await eventually(lambda: not served.shared.members)


async def test_clients_need_a_certificate_only_if_there_is_a_ca(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config) as served:
        async with connected(served, trusting(config, shows=True)) as wire:
            assert await is_answered(wire)
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            # With TLS 1.3 a client learns it when it reads.
            async with connected(served, trusting(config)) as wire:
                await is_answered(wire)
        await eventually(lambda: not served.shared.members)


async def test_a_client_without_tls_is_disconnected_and_affects_no_other(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            try:
                answer = await reader.read()
            except ConnectionError:
                answer = b""
        assert b"HTTP" not in answer
        writer.close()
        await eventually(lambda: not served.shared.members)
        async with connected(served, trusting(config, shows=True)) as wire:
            assert await is_answered(wire)


async def test_a_silent_client_counts_and_is_disconnected_at_the_deadline(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config, handshake_s=1.0, max_connections=2) as served:
        silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]
        await eventually(lambda: len(served.shared.members) == 2)
        await eventually(lambda: not served.shared.members)
        for each in silent:
            each.settimeout(WAIT_S)
            with suppress(ConnectionError):
                assert each.recv(1) == b""
            each.close()
        async with connected(served, trusting(config, shows=True)) as wire:
            assert await is_answered(wire)


async def test_a_request_sent_with_the_end_of_the_handshake_is_answered(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config.model_copy(update={"ca": None})) as served:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting(config).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(1 << 16))
        client.write(request("POST", "/echo", b"hi"))
        writer.write(outgoing.read())  # in one segment with the client's Finished
        answer = b""
        async with asyncio.timeout(WAIT_S):
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
    async with serving(config, max_connections=1) as served:
        async with connected(served, trusting(config, shows=True)) as wire:
            assert await is_answered(wire)
            assert len(served.shared.members) == 1


async def test_an_invalid_request_is_answered_over_tls_too(authority, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = authority.write(tmp_path)
    async with serving(config.model_copy(update={"ca": None})) as served:
        async with connected(served, trusting(config)) as wire:
            await wire.send(b"nonsense\r\n\r\n")
            assert (await wire.response()).status == 400
        await eventually(lambda: not served.shared.members)
    assert re.search(r"client connection rejected peer=127\.0\.0\.1:\d+ ", caplog.text)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_new_certificates_apply_from_the_next_handshake_on(authority, tmp_path):
    config = authority.write(tmp_path)
    before = trusting(config, shows=True)
    async with serving(config) as served:
        async with connected(served, before) as old:
            assert await is_answered(old)
            Authority().write(tmp_path)
            async with connected(served, trusting(config, shows=True)) as new:
                assert await is_answered(new)
            with pytest.raises(ssl.SSLCertVerificationError):
                async with connected(served, before):
                    pass
            assert await is_answered(old)
