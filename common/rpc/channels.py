"""Client channels: addresses, options, TLS and identity.

gRPC's own channel keeps its first certificates. `TlsGrpcChannel` wraps one, and replaces it at the
next call after the certificates have changed. The old one stays open until its calls end.

Calls of a `SigningChannel` carry a token and require the callee's proof. Calls of methods without a
rule in guard.py are not changed. Without a valid proof, the call fails with UNAUTHENTICATED like a
failed connection: no response is read, and nothing is sent on a stream.
"""

import asyncio
import re
from abc import abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
import grpc.aio

from common import tls
from common.errors import InvalidRequest
from common.identity.guard import MAY_CALL, AuthRejection
from common.identity.tokens import BEARER, PROOF, SHOWN, Identity, Token

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(address: str) -> str:
    """Return `address` if it is host:port, and not another form that gRPC would resolve.

    Raises:
        InvalidRequest: it is not.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise InvalidRequest(f"invalid address, expected host:port: {address[:100]!r}")
    return address


class Network(Protocol):
    """A replacement for gRPC's network in simulations, without TLS."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to host:port."""

    def server(self) -> grpc.aio.Server:
        """Return a server that is not bound yet."""


_used: ContextVar[Network | None] = ContextVar("network", default=None)


def current() -> Network | None:
    """Return the network in use in this context, or None for gRPC's own."""
    return _used.get()


@contextmanager
def use(network: Network) -> Iterator[None]:
    """Use a network inside the context, and in all tasks that start there."""
    token = _used.set(network)
    try:
        yield
    finally:
        _used.reset(token)


# A prompt of a million tokens has 3 to 5 MB, and a Step of 10,000 requests 0.1 MB.
MAX_MESSAGE_BYTES = 12 << 20
_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A vanished host sends no reset. A ping every 10 s, with 5 s to respond, detects it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # Callers decide about deadlines and backoff, not the library (1 s to 2 min).
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Each new channel gets a new connection, without the backoff of the previous one.
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # By default, a second server silently binds the same port and gets half of the connections.
    ("grpc.so_reuseport", 0),
    # Otherwise the server ends connections of clients that ping as in CHANNEL_OPTIONS.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Detects vanished clients. The default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
)
# Routers, other nodes, operators and probes call a node over one connection each, with few calls.
# gRPC limits connections in total, not by host, so unauthenticated hosts may open many for a short
# time.
NODE_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_concurrent_streams", 64),  # per connection
    ("grpc.max_allowed_incoming_connections", 8192),  # 17 KB each; see `allow_many`
    ("grpc.max_connection_idle_ms", 10_000),  # for connections without calls
)


class CallingChannel(grpc.aio.Channel):
    """Base of channels that wrap another channel. For one event loop. The caller closes it."""

    @abstractmethod
    def current(self) -> grpc.aio.Channel:
        """Return the channel that a call would use now."""

    @abstractmethod
    def calling(self, kind: str, method: tuple[Any, ...], how: dict[str, Any]) -> Any:
        """Return the callable for one method.

        Args:
            kind: "unary_unary" or another kind of call.
            method: positional arguments of the channel method of that kind.
            how: keyword arguments of that channel method.
        """

    def unary_unary(self, *method: Any, **how: Any) -> Any:
        return self.calling("unary_unary", method, how)

    def unary_stream(self, *method: Any, **how: Any) -> Any:
        return self.calling("unary_stream", method, how)

    def stream_unary(self, *method: Any, **how: Any) -> Any:
        return self.calling("stream_unary", method, how)

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        return self.calling("stream_stream", method, how)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()


class TlsGrpcChannel(CallingChannel):
    def __init__(
        self, address: str, certificates: tls.Certificates, options: Sequence[tuple[str, Any]]
    ) -> None:
        """
        Args:
            certificates: has a `ca`, which verifies the other side.
        """
        self._address = address
        self._certificates = certificates
        self._options = list(options)
        if certificates.config.server_name:
            name = certificates.config.server_name
            self._options.append(("grpc.ssl_target_name_override", name))
        self._used = certificates.current()
        self._inner = self._make()
        self._num_calls: dict[grpc.aio.Channel, int] = {self._inner: 0}  # includes old channels
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self, grace: float | None = None) -> None:
        """Close the channel like gRPC's: calls have `grace` seconds, or end immediately."""
        await asyncio.gather(*(each.close(grace) for each in list(self._num_calls)))
        await asyncio.gather(*self._closing)

    def calling(self, kind: str, method: tuple[Any, ...], how: dict[str, Any]) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            inner = self.current()
            made = getattr(inner, kind)(*method, **how)(*arguments, **settings)
            self._num_calls[inner] += 1
            made.add_done_callback(lambda _: self._done(inner))
            return made

        return call

    def _done(self, inner: grpc.aio.Channel) -> None:
        self._num_calls[inner] -= 1
        self._see_off(inner)

    def current(self) -> grpc.aio.Channel:
        pems = self._certificates.current()
        if pems is not self._used:
            old, self._used = self._inner, pems
            self._inner = self._make()
            self._num_calls[self._inner] = 0
            self._see_off(old)
        return self._inner

    def _see_off(self, inner: grpc.aio.Channel) -> None:
        """Close an old inner channel that has no more calls."""
        if inner is not self._inner and not self._num_calls[inner]:
            del self._num_calls[inner]
            closing = asyncio.ensure_future(inner.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _make(self) -> grpc.aio.Channel:
        credentials = tls.channel_credentials(self._used)
        return grpc.aio.secure_channel(self._address, credentials, options=self._options)


class SigningChannel(CallingChannel):
    def __init__(self, inner: grpc.aio.Channel, identity: Identity) -> None:
        """
        Args:
            inner: owned by this object from now on.
        """
        self._inner = inner
        self._identity = identity

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def current(self) -> grpc.aio.Channel:
        return self._inner

    def calling(self, kind: str, method: tuple[Any, ...], how: dict[str, Any]) -> Any:
        made = getattr(self._inner, kind)(*method, **how)
        name = method[0]
        if name not in MAY_CALL:
            return made
        proved = _ProvedUnary if kind.endswith("unary") else _ProvedStream

        def call(*arguments: Any, metadata: Any = (), **settings: Any) -> Any:
            token = self._identity.token(name)
            shown = (*(metadata or ()), (SHOWN, BEARER + token.text))
            return proved(made(*arguments, metadata=shown, **settings), self._checking(token))

        return call

    def _checking(self, token: Token) -> Callable[[Any], Awaitable[None]]:
        """Return the check of the callee's proof for the call of `token`."""

        async def check(call: Any) -> None:
            proof = (await call.initial_metadata()).get(PROOF)
            try:
                if proof is None:
                    raise AuthRejection("missing", "it sent no proof")
                self._identity.check_proof(token, proof)
            except AuthRejection as refused:
                self._identity.count("callee", refused.reason)
                call.cancel()
                raise _unproved(refused) from refused

        return check


class _Proved:
    """A call whose proof is checked before its response is used."""

    def __init__(self, call: Any, check: Callable[[Any], Awaitable[None]]) -> None:
        self._call = call
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class _ProvedUnary(_Proved):
    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        answer = await self._call
        await self._check(self._call)
        return answer


class _ProvedStream(_Proved):
    def __init__(self, call: Any, check: Callable[[Any], Awaitable[None]]) -> None:
        super().__init__(call, check)
        self._proving: asyncio.Task[None] | None = None

    async def write(self, message: Any) -> None:
        await self._proved()
        await self._call.write(message)

    async def read(self) -> Any:
        await self._proved()
        return await self._call.read()

    async def __aiter__(self) -> AsyncIterator[Any]:
        await self._proved()
        async for message in self._call:
            yield message

    async def _proved(self) -> None:
        """Check the proof once. All concurrent callers get the same result."""
        if self._proving is None:
            self._proving = asyncio.ensure_future(self._prove())
            self._proving.add_done_callback(_seen)
        await asyncio.shield(self._proving)

    async def _prove(self) -> None:
        metadata = await self._call.initial_metadata()
        if PROOF not in metadata and self._call.done():
            await self._call.read()  # raises the error that ended the call, if any
        await self._check(self._call)


def _seen(proving: "asyncio.Task[None]") -> None:
    """Mark the exception as retrieved, in case no caller waits for it any more."""
    if not proving.cancelled():
        proving.exception()


def _unproved(refused: AuthRejection) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAUTHENTICATED,
        nothing,
        nothing,
        details=f"the server there did not prove that it is a node of this cluster: {refused}",
    )


def make_channel(
    address: str,
    certificates: tls.Certificates | None = None,
    identity: Identity | None = None,
) -> grpc.aio.Channel:
    """Return a channel with a separate connection to host:port. The caller closes it.

    Args:
        certificates: used for TLS if they include a `ca`, which verifies the other side.
        identity: authenticates to nodes, which must prove theirs.
    """
    channel: grpc.aio.Channel
    if (network := current()) is not None:
        channel = network.channel(address)
    elif certificates is None or certificates.config.ca is None:
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    else:
        channel = TlsGrpcChannel(address, certificates, CHANNEL_OPTIONS)
    return channel if identity is None else SigningChannel(channel, identity)


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task is being cancelled.

    For loops that catch AioRpcError: if a call fails at the moment of a cancellation, grpcio raises
    only the failure, and the cancellation would be lost.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
