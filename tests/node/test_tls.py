"""TLS of gRPC: accepted peers, rejected ones, and files that change."""

import asyncio
import os
import socket
import ssl
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import rpc, tls
from common.config import TlsConfig
from common.errors import ConfigError
from protos import router_pb2, router_pb2_grpc
from tests.node.conftest import eventually
from tests.support.network import grpc_calls
from tests.support.network.certificates import Authority
from tests.support.processes.cluster import free_ports

EMPTY = TlsConfig()


class Service(router_pb2_grpc.RouterServicer):
    """Counts letters, and streams until it is cancelled."""

    async def Tokenize(self, request, context):
        return router_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(self, request, context):
        yield router_pb2.GenerateResponse(text="first")
        await asyncio.Event().wait()


def serving(config: TlsConfig, port: int = 0) -> AbstractAsyncContextManager[str]:
    """Serve with `config` while inside. Yield the address."""
    add = router_pb2_grpc.add_RouterServicer_to_server
    certificates = tls.certificates(config, "--server.tls")
    return grpc_calls.serving((add, Service()), port=port, certificates=certificates)


async def ask(channel: grpc.aio.Channel) -> str:
    """Return "" if the server responds, and otherwise the reason."""
    stub = router_pb2_grpc.RouterStub(channel)
    try:
        answer = await stub.Tokenize(router_pb2.TokenizeRequest(text="four"), timeout=60.0)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    assert list(answer.token_ids) == [4]
    return ""


async def ask_again(address: str, config: TlsConfig) -> str:
    async with rpc.make_channel(address, tls.certificates(config, "--tls")) as channel:
        return await ask(channel)


@pytest.fixture
def authority():
    return Authority()


# Accepted peers -----------------------------------------------------------------------------------


async def test_a_server_with_a_ca_accepts_only_callers_signed_by_it(authority, tmp_path):
    config = authority.write(tmp_path / "node")
    stranger = Authority().write(tmp_path / "stranger")
    without = TlsConfig(ca=config.ca)
    with_anothers = TlsConfig(ca=config.ca, cert=stranger.cert, key=stranger.key)
    async with serving(config) as address:
        assert await ask_again(address, config) == ""
        for unwelcome in (EMPTY, without, with_anothers):
            assert await ask_again(address, unwelcome)
        assert "CERTIFICATE_VERIFY_FAILED" in await ask_again(address, stranger)
        assert await ask_again(address, config) == ""


async def test_a_server_without_a_ca_accepts_every_caller_that_trusts_it(authority, tmp_path):
    config = authority.write(tmp_path)
    async with serving(config.model_copy(update={"ca": None})) as address:
        assert await ask_again(address, TlsConfig(ca=config.ca)) == ""
        assert await ask_again(address, EMPTY)


async def test_a_server_is_verified_by_its_address_or_by_the_configured_name(authority, tmp_path):
    config = authority.write(tmp_path, "baton-node")
    named = config.model_copy(update={"server_name": "baton-node"})
    async with serving(config) as address:
        assert "Hostname" in await ask_again(address, config)
        assert await ask_again(address, named) == ""
        other = config.model_copy(update={"server_name": "another"})
        assert await ask_again(address, other)


async def test_a_caller_with_a_ca_sends_nothing_to_a_server_without_tls(authority, tmp_path):
    async with serving(EMPTY) as address:
        assert await ask_again(address, EMPTY) == ""
        assert await ask_again(address, authority.write(tmp_path))


# Changed files ------------------------------------------------------------------------------------


async def test_new_files_apply_from_the_next_handshake_on_and_streams_continue(authority, tmp_path):
    config = authority.write(tmp_path / "node")
    async with (
        serving(config) as address,
        rpc.make_channel(address, tls.certificates(config, "--tls")) as channel,
    ):
        stub = router_pb2_grpc.RouterStub(channel)
        stream = stub.Generate(router_pb2.GenerateRequest())
        assert (await stream.read()).text == "first"
        # Both ends now trust only the new authority, and have its certificates.
        Authority().write(tmp_path / "node")
        assert await ask(channel) == ""
        assert await ask_again(address, config) == ""
        assert not stream.done()
        before = authority.write(tmp_path / "before")
        assert "CERTIFICATE_VERIFY_FAILED" in await ask_again(address, before)


async def test_a_channel_with_new_files_calls_servers_with_new_files(authority, tmp_path):
    config = authority.write(tmp_path)
    (port,) = free_ports(1)
    async with rpc.make_channel(f"127.0.0.1:{port}", tls.certificates(config, "--tls")) as channel:
        async with serving(config, port):
            assert await ask(channel) == ""
        Authority().write(tmp_path)
        async with serving(config, port):
            assert await ask(channel) == ""


@pytest.mark.parametrize("wrong", ["another key", "nonsense", "nothing", "expired"])
async def test_invalid_files_cause_a_warning_and_the_previous_ones_remain(
    authority, tmp_path, caplog, wrong
):
    config = authority.write(tmp_path / "node")
    async with serving(config) as address:
        match wrong:
            case "another key":
                config.key.write_bytes(Authority().write(tmp_path / "other").key.read_bytes())
            case "nonsense":
                config.cert.write_text("nonsense")
            case "nothing":
                config.cert.unlink()
            case "expired":
                authority.write(tmp_path / "node", not_after=datetime.now(UTC))
        caller = authority.write(tmp_path / "caller")
        for _ in range(3):
            assert await ask_again(address, caller) == ""
        (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert "--server.tls" in warning
        # A corrected file is used at once.
        new = Authority()
        new.write(tmp_path / "node")
        assert await ask_again(address, new.write(tmp_path / "caller")) == ""


def test_files_that_become_valid_later_are_used_then(authority, tmp_path):
    """The clock of this host is behind that of the signer."""
    config = authority.write(tmp_path)
    certificates = tls.Certificates(config, "--server.tls", again_s=0.01)
    old = certificates.current()
    authority.write(tmp_path, not_before=datetime.now(UTC) + timedelta(seconds=4))
    assert certificates.current() is old
    eventually(lambda: certificates.current() is not old)
    assert certificates.current().cert == config.cert.read_bytes()


def test_credentials_are_cached_until_the_files_change(authority, tmp_path):
    certificates = tls.Certificates(authority.write(tmp_path), "--server.tls")
    first = certificates.current()
    assert certificates.current() is first
    os.utime(certificates.config.cert, ns=(1, 1))
    assert certificates.current() is not first


def test_files_behind_a_changed_link_are_loaded(authority, tmp_path):
    """Kubernetes updates a mounted Secret in this way."""
    for version in ("1", "2"):
        authority.write(tmp_path / version)
    link = tmp_path / "now"
    link.symlink_to("1")
    config = TlsConfig(cert=link / "tls.crt", key=link / "tls.key")
    certificates = tls.Certificates(config, "--server.tls")
    (tmp_path / "turned").symlink_to("2")
    (tmp_path / "turned").replace(link)
    assert certificates.current().cert == (tmp_path / "2" / "tls.crt").read_bytes()


# Files rejected at the start ----------------------------------------------------------------------


# In DER: "version 3", and "P-256".
VERSION = bytes.fromhex("a003020102")
CURVE = bytes.fromhex("06082a8648ce3d030107")


def _change(path: Path, what: bytes, last: bytes) -> None:
    """Return a certificate with another last byte of `what`."""
    der = x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)
    assert what in der
    path.write_text(ssl.DER_cert_to_PEM_cert(der.replace(what, what[:-1] + last)))


def _encrypted(path: Path) -> None:
    key = load_pem_private_key(path.read_bytes(), None)
    how = BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (lambda c: c.cert.unlink(), "tls.crt: No such file or directory"),
        (lambda c: (c.key.unlink(), c.key.mkdir()), "tls.key: Is a directory"),
        (lambda c: c.cert.write_text("x"), "tls.crt holds no PEM certificate"),
        (lambda c: _change(c.cert, VERSION, b"\x09"), "tls.crt holds no PEM certificate"),
        (lambda c: _change(c.cert, CURVE, b"\x7f"), "tls.crt is not supported"),
        (lambda c: c.ca.write_text(""), "ca.crt holds no PEM certificate"),
        (lambda c: c.key.write_text("x"), "tls.key holds no PEM private key"),
        (lambda c: _encrypted(c.key), "tls.key is encrypted"),
        (lambda c: Authority().write(c.cert.parent / "b").key.rename(c.key), "is not the certif"),
        (
            lambda c: Authority().write(c.cert.parent, not_after=datetime(2001, 1, 1, tzinfo=UTC)),
            "to 2001-01-01T00:00:00Z, not now",
        ),
    ],
)
def test_an_unusable_file_is_rejected_by_name(authority, tmp_path, spoil, sentence):
    config = authority.write(tmp_path)
    spoil(config)
    with pytest.raises(ConfigError, match=sentence) as caught:
        tls.certificates(config, "--server.tls")
    assert str(caught.value).startswith("--server.tls: ")
    assert "\n" not in str(caught.value)


def test_a_bundle_may_contain_an_expired_authority_beside_a_valid_one(authority, tmp_path):
    """A bundle contains both while one replaces the other."""
    config = authority.write(tmp_path)
    pem = expired_authority()
    config.ca.write_bytes(pem)
    with pytest.raises(ConfigError, match=r"no certificate in .* is valid now"):
        tls.certificates(config, "--server.tls")
    config.ca.write_bytes(pem + authority.write(tmp_path / "b").ca.read_bytes())
    assert tls.certificates(config, "--server.tls") is not None


def expired_authority() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "over")])
    end = datetime.now(UTC) - timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(end - timedelta(days=1))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM)


# Health ------------------------------------------------------------------------------------------


async def test_a_health_port_serves_probes_without_tls_only_health(authority, tmp_path):
    (port,) = free_ports(1)
    server = rpc.make_server()
    names = rpc.add_service(server, router_pb2_grpc.add_RouterServicer_to_server, Service())
    health = rpc.add_health_and_reflection(server, names)
    await health.set_serving(True)
    probe = health_pb2.HealthCheckRequest(service="baton.v1.Router")
    async with (
        rpc.serving_health(health, "127.0.0.1", port),
        rpc.make_channel(f"127.0.0.1:{port}") as channel,
    ):
        check = health_pb2_grpc.HealthStub(channel).Check
        assert (await check(probe)).status == health_pb2.HealthCheckResponse.SERVING
        await health.set_serving(False)
        assert (await check(probe)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router_pb2_grpc.RouterStub(channel).Tokenize(router_pb2.TokenizeRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
