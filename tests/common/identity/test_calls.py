"""Authenticated calls between processes over real gRPC: accepted callers, verified servers, and the
messages of both sides.

Seen failing, each without its line: the check of roles in CallAuthenticator._admit, `_use` in
TokenAuthentication, `leeway` and `audience` in tokens.verify, `_check` in _ProvedStream._prove and
_ProvedUnary, the comparison of nonces in Identity.check_proof, the float of `exp` in tokens.verify
and its limit, reading the claims of a token only after its signature, parsing after and not before
CallAuthenticator's answer in services._guarded.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import grpc.aio
import jwt
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common import rpc
from common.errors import Forbidden
from common.identity import secret, tokens
from common.identity.guard import ROLES, CallAuthenticator, uncounted
from common.identity.secret import SecretKeys, new_secret, operator_keys
from common.identity.tokens import Identity, TokenAuthentication
from protos import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc, router_pb2
from tests.support.network.grpc_calls import end_of_stream, status_of

Code = grpc.StatusCode
SECRET, OTHER = new_secret(), new_secret()
DRAIN = "/baton.v1.Node/Drain"
DESCRIBE = "/baton.v1.Node/Describe"
SERVE = "/baton.v1.DecodeNode/Serve"


@dataclass
class Keys:
    """A keyring that changes into another one."""

    text: str = SECRET
    role: str = "node"

    def current(self) -> SecretKeys:
        return secret.parse(self.text, "the test", self.role)


@dataclass
class Counted:
    """A record of the counted refusals, in order."""

    refusals: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, side: str, reason: str) -> None:
        self.refusals.append((side, reason))


def identity(role, text=SECRET, *, name="somebody", count=uncounted) -> Identity:
    return Identity(role, name, Keys(text, role), count)


class Service(node_pb2_grpc.NodeServicer, decode_pb2_grpc.DecodeNodeServicer):
    """Reports its caller, and records its messages."""

    def __init__(self) -> None:
        self.heard: list[decode_pb2.ToNode] = []

    async def Describe(self, request, context):
        return node_pb2.DescribeResponse(role=context.caller.name)

    async def Drain(self, request, context):
        return node_pb2.DrainResponse()

    async def FlushCache(self, request, context):
        raise Forbidden("its own words")

    async def WatchCache(self, request, context) -> None:
        await context.write(node_pb2.CacheEvents(page_size=16))

    async def Serve(self, messages, context) -> None:
        await context.write(decode_pb2.FromNode(status=decode_pb2.Status(state="ready")))
        async for message in messages:
            self.heard.append(message)


@contextlib.asynccontextmanager
async def serving(guard: CallAuthenticator | None) -> AsyncIterator[tuple[Service, str]]:
    server, service = rpc.make_server(), Service()
    port = rpc.bind(server, "127.0.0.1", 0)
    names = rpc.add_service(server, node_pb2_grpc.add_NodeServicer_to_server, service, guard)
    names += rpc.add_service(
        server, decode_pb2_grpc.add_DecodeNodeServicer_to_server, service, guard
    )
    health = rpc.add_health_and_reflection(server, names, guard)
    await health.set_serving(True)
    await server.start()
    yield service, f"127.0.0.1:{port}"
    await rpc.stop(server, 0.0)


@dataclass
class Node:
    """A server whose callers must authenticate."""

    service: Service
    address: str
    keys: Keys
    refused: Counted

    @contextlib.asynccontextmanager
    async def called_as(self, who: Identity | None):
        async with rpc.make_channel(self.address, None, who) as channel:
            yield channel

    async def drained_with(self, *metadata) -> tuple[Code, str]:
        async with rpc.make_channel(self.address) as channel:
            return await status_of(drain(channel, metadata=metadata))

    async def refuses(self, *metadata, words: str = "") -> str:
        """Return the sentence with which a call with these credentials is rejected."""
        code, sentence = await self.drained_with(*metadata)
        assert code is Code.UNAUTHENTICATED and sentence
        assert words in sentence
        return sentence


@pytest.fixture
async def node():
    keys, refused = Keys(), Counted()
    guard = CallAuthenticator(
        TokenAuthentication(Identity("node", "the node", keys, refused)), refused
    )
    async with serving(guard) as (service, address):
        yield Node(service, address, keys, refused)


def drain(channel, **settings):
    return node_pb2_grpc.NodeStub(channel).Drain(node_pb2.DrainRequest(), timeout=60, **settings)


def describe(channel):
    return node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest(), timeout=60)


def serve(channel):
    return decode_pb2_grpc.DecodeNodeStub(channel).Serve()


def bearer(text: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {text}")


# Accepted callers ---------------------------------------------------------------------------------


async def test_each_role_may_call_its_methods_and_is_identified(node):
    async with node.called_as(identity("router", name="router-7")) as channel:
        assert (await describe(channel)).role == "router-7"
        call = serve(channel)
        assert (await call.read()).status.state == "ready"
        await call.write(decode_pb2.ToNode(cancels=[5]))
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert node.service.heard == [decode_pb2.ToNode(cancels=[5])]
        watching = node_pb2_grpc.NodeStub(channel).WatchCache(node_pb2.WatchCacheRequest())
        assert [events.page_size async for events in watching] == [16]
    async with node.called_as(identity("operator")) as channel:
        assert await status_of(drain(channel)) == (Code.OK, "")
    assert node.refused.refusals == []


async def test_health_is_public_and_reflection_is_for_operators(node):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    for who, code in ((None, Code.UNAUTHENTICATED), (identity("operator"), Code.OK)):
        async with node.called_as(who) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=60
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            listing = stub.ServerReflectionInfo(timeout=60)
            if code is Code.OK:  # the others are rejected before their first message
                await listing.write(request)
            assert (await status_of(listing.read()))[0] is code


async def test_the_operators_key_alone_suffices_only_for_an_operator(node):
    (key,) = operator_keys(secret.parse(SECRET, "the test", "node"))
    async with node.called_as(identity("operator", key)) as channel:
        assert await status_of(drain(channel)) == (Code.OK, "")
    for role in set(ROLES) - {"operator"}:
        with pytest.raises(secret.ConfigError, match=f"a {role} needs the secret"):
            secret.parse(key, "the test", role)


async def test_a_new_secret_is_accepted_beside_the_old_one_which_then_expires(node):
    new = new_secret()
    old_caller, new_caller = identity("operator"), identity("operator", new)
    for text, old_code, new_code in (
        (SECRET, Code.OK, Code.UNAUTHENTICATED),
        (f"{SECRET}\n{new}", Code.OK, Code.OK),
        (f"{new}\n{SECRET}", Code.OK, Code.OK),
        (new, Code.UNAUTHENTICATED, Code.OK),
    ):
        node.keys.text = text
        for who, code in ((old_caller, old_code), (new_caller, new_code)):
            async with node.called_as(who) as channel:
                assert (await status_of(drain(channel)))[0] is code, text


# Rejected callers ---------------------------------------------------------------------------------


async def test_a_caller_without_a_secret_gets_the_reason(node, caplog):
    sentence = await node.refuses(words="has no cluster secret")
    assert sentence in caplog.text and DRAIN in caplog.text  # on this side too
    assert node.refused.refusals == [("caller", "missing")]


async def test_another_secret_is_rejected(node):
    token = identity("operator", OTHER).token(DRAIN)
    await node.refuses(bearer(token.text), words="another secret")
    assert node.refused.refusals == [("caller", "secret")]


@pytest.mark.parametrize("method, role", [(DRAIN, "router"), (DRAIN, "node"), (DESCRIBE, "node")])
async def test_a_role_may_call_exactly_the_methods_of_the_table(node, method, role):
    async with node.called_as(identity(role)) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        call = stub.Drain(node_pb2.DrainRequest()) if method == DRAIN else describe(channel)
        code, sentence = await status_of(call)
    assert code is Code.PERMISSION_DENIED
    assert f"{role} may not call {method}" in sentence
    assert node.refused.refusals == [("caller", "role")]


async def test_a_token_of_one_call_is_invalid_for_others(node):
    token = identity("operator").token(DESCRIBE)
    await node.refuses(bearer(token.text), words=f"made for {DESCRIBE!r}, not for {DRAIN!r}")
    token = identity("operator").token(DRAIN)
    assert await node.drained_with(bearer(token.text)) == (Code.OK, "")
    await node.refuses(bearer(token.text), words="used before")
    assert node.refused.refusals == [("caller", "call"), ("caller", "replayed")]


@pytest.mark.parametrize(
    "shift_s, sentence",
    [
        (-85.0, ""),  # valid for 60 s, and the clocks may differ by 30 s
        (-95.0, "made 95 s ago by its issuer's clock and is valid for 60 s: the clocks"),
        (25.0, ""),
        (35.0, "made 35 s in the future by its issuer's clock: the clocks of the two hosts"),
    ],
)
async def test_a_difference_of_clocks_is_reported(node, monkeypatch, shift_s, sentence):
    here = time.time
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(tokens.time, "time", lambda: here() + shift_s)
        token = identity("operator").token(DRAIN)
    code, said = await node.drained_with(bearer(token.text))
    assert code is (Code.UNAUTHENTICATED if sentence else Code.OK)
    assert sentence in said
    assert node.refused.refusals == ([("caller", "clock")] if sentence else [])


def _unsigned() -> str:
    return jwt.encode({"sub": "x"}, None, "none", headers={"kid": "operator"})


def _signed(**claims: object) -> str:
    """Return a token of an operator with these claims."""
    key = secret.parse(SECRET, "the test", "node").keys["operator"][0]
    whole = {"sub": "x", "aud": DRAIN, **claims}
    return jwt.encode(whole, key, "HS256", headers={"kid": "operator"})


def _lasting(seconds: float) -> str:
    now = time.time()
    return _signed(jti="n", iat=now, exp=now + seconds)


async def test_times_that_are_texts_do_not_affect_later_calls(node):
    now = int(time.time())
    text = _signed(jti="n", iat=now, exp=str(now + 60))
    assert await node.drained_with(bearer(text)) == (Code.OK, "")
    token = identity("operator").token(DRAIN)
    assert await node.drained_with(bearer(token.text)) == (Code.OK, "")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "malformed"),
        ("x.y.z", "malformed"),
        ("x" * 3000, "malformed"),
        (jwt.encode({}, "k" * 32, "HS256", headers={"kid": "root"}), "malformed"),
        (jwt.encode({}, "k" * 32, "HS256"), "malformed"),
        (_unsigned(), "malformed"),
        (_unsigned().replace(".", ".AAAA", 1), "malformed"),  # nor are its claims
        (_signed(), "malformed"),  # without an end
        (_lasting(3600.0), "malformed"),
    ],
)
async def test_an_invalid_token_is_rejected_without_side_effects(node, text, reason):
    await node.refuses(bearer(text))
    assert node.refused.refusals == [("caller", reason)]


async def test_messages_of_a_rejected_caller_are_not_parsed(node):
    """Otherwise the error would be INVALID_ARGUMENT."""
    async with rpc.make_channel(node.address) as channel:
        call = channel.unary_unary("/baton.v1.Node/Abort")(b"\xff\xff\xff", timeout=60)
        assert (await status_of(call))[0] is Code.UNAUTHENTICATED
    code, sentence = await asyncio.to_thread(end_of_stream, node.address, SERVE, b"\xff\xff\xff")
    assert code is Code.UNAUTHENTICATED and "has no cluster secret" in sentence
    assert node.refused.refusals == [("caller", "missing")] * 2


async def test_many_rejections_write_few_log_lines(node, caplog):
    for _ in range(40):
        await node.drained_with()
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 0 < len(lines) <= 10
    assert len(node.refused.refusals) == 40


# Verified servers ---------------------------------------------------------------------------------


async def test_an_impostor_on_a_nodes_address_gets_no_message_and_is_not_trusted():
    count = Counted()
    async with (
        serving(None) as (service, address),
        rpc.make_channel(address, None, identity("router", count=count)) as channel,
    ):
        call = serve(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.write(decode_pb2.ToNode(cancels=[1]))
        assert caught.value.code() is Code.UNAUTHENTICATED
        assert "did not prove that it is a node of this cluster" in caught.value.details()
        assert (await status_of(call.read()))[0] is Code.UNAUTHENTICATED
        assert service.heard == []
        assert (await status_of(describe(channel)))[0] is Code.UNAUTHENTICATED
        watching = node_pb2_grpc.NodeStub(channel).WatchCache(node_pb2.WatchCacheRequest())
        assert (await status_of(anext(aiter(watching))))[0] is Code.UNAUTHENTICATED
    assert count.refusals == [("callee", "missing")] * 3


@pytest.mark.parametrize(
    "forge, reason",
    [
        (lambda said, fresh: fresh(OTHER, "node", said), "secret"),
        (lambda said, fresh: fresh(SECRET, "router", said), "role"),
        (lambda said, fresh: fresh(SECRET, "node", None), "replayed"),  # of another call
        (lambda said, fresh: "x", "malformed"),
    ],
)
async def test_a_proof_must_be_a_nodes_and_of_this_call(monkeypatch, forge, reason):
    node = identity("node")

    def admit(method, text):
        called, _ = Identity.admit(node, method, text)

        def fresh(text, role, nonce):
            keyring = secret.parse(text, "the test", "node")
            return tokens.sign(keyring, role, "x", f"answer of {method}", nonce=nonce).text

        return called, forge(called.nonce, fresh)

    monkeypatch.setattr(node, "admit", admit)
    guard = CallAuthenticator(TokenAuthentication(node), uncounted)
    count = Counted()
    async with (
        serving(guard) as (_, address),
        rpc.make_channel(address, None, identity("router", count=count)) as channel,
    ):
        call = serve(channel)
        assert (await status_of(call.read()))[0] is Code.UNAUTHENTICATED
        assert (await status_of(describe(channel)))[0] is Code.UNAUTHENTICATED
    assert count.refusals == [("callee", reason)] * 2


async def test_the_error_of_a_call_reaches_its_caller_even_without_a_proof(node):
    """A node that is gone, or that rejects the call, is no impostor."""
    async with node.called_as(identity("router", OTHER)) as channel:
        code, sentence = await status_of(serve(channel).read())
        assert code is Code.UNAUTHENTICATED and "another secret" in sentence
        with pytest.raises(grpc.aio.AioRpcError, match="another secret"):
            await serve(channel).write(decode_pb2.ToNode())
    async with rpc.make_channel("127.0.0.1:1", None, identity("router")) as channel:
        assert (await status_of(serve(channel).read()))[0] is Code.UNAVAILABLE
        assert (await status_of(describe(channel)))[0] is Code.UNAVAILABLE
    async with node.called_as(identity("operator")) as channel:
        flushing = node_pb2_grpc.NodeStub(channel).FlushCache(router_pb2.FlushCacheRequest())
        assert await status_of(flushing) == (Code.PERMISSION_DENIED, "its own words")


async def test_a_cancelled_stream_raises_only_the_cancellation():
    async with serving(None) as (_, address), rpc.make_channel(address) as bare:
        del bare
        async with rpc.make_channel(address, None, identity("router")) as channel:
            call = serve(channel)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call.read()


def test_every_method_of_a_node_has_a_rule():
    guard = CallAuthenticator(lambda method, context: None, uncounted)
    for service in (node_pb2, decode_pb2):
        for one in service.DESCRIPTOR.services_by_name.values():
            for method in one.methods:
                assert guard.of(f"/{one.full_name}/{method.name}")
    with pytest.raises(KeyError):
        guard.of("/baton.v1.Node/Format")
