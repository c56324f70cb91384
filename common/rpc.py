"""gRPC as all programs use it: options, error mapping, tolerant decoding, health, reflection.

A service added with `add_service` never sees bytes that are no message: the caller gets
INVALID_ARGUMENT, where grpcio alone would answer UNKNOWN. Nor does it see a caller that its guard
does not let in, of whom nothing is received. Its methods simply raise ServingError; the status goes
out with the sentence.
"""

import asyncio
import inspect
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common import reflection, tls
from common.errors import ConfigError, InvalidRequest, Overloaded, ServingError
from common.identity.caller import ANYBODY
from common.identity.identity import Identity
from common.identity.signing_channel import SigningChannel
from common.log_throttle import Throttle, ThrottledLog
from common.tls_channel import TlsChannel
from common.wire_fields import MAX_FIELDS, FieldCounter

log = logging.getLogger(__name__)
log_of_faults = ThrottledLog(log, Throttle())  # a bug that strangers can reach is no flood of lines

S = TypeVar("S")

# A prompt of a million tokens is 3 to 5 MB of varints; a step of 10 000 requests 0.1 MB.
MAX_MESSAGE_BYTES = 12 << 20
PORT, HEALTH_PORT = "--port", "--front.health-port"  # knobs, for sentences about them

_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A host that vanished sends no reset: a ping every 10 s, answered within 5 s, finds it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # The callers' own deadlines and backoff decide, not the library's (1 s to 2 min).
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A new channel is a new connection; otherwise it inherits the backoff of the last one.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # By default a second server on a port binds in silence and takes half of the connections.
    ("grpc.so_reuseport", 0),
    # Else the server ends connections of clients that ping as CHANNEL_OPTIONS tells them to.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Of a connection that says nothing, two minutes otherwise.
    ("grpc.server_handshake_timeout_ms", 10_000),
)

# A node is called by routers, other nodes, operators and probes, each over one connection with few
# calls.
# gRPC counts connections in all, and not by host: a stranger's may be many, and none for long.
NODE_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_concurrent_streams", 64),  # of one connection
    ("grpc.max_allowed_incoming_connections", 8192),  # 17 KB each; see `descriptors.py`
    ("grpc.max_connection_idle_ms", 10_000),  # without a call
)

MAX_HEALTH_WATCHERS = 64  # they need not say who they are, and keep their connections

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def raise_if_cancelled() -> None:
    """For loops that catch AioRpcError: when a call fails in the moment in which its task is
    cancelled, grpcio raises the failure alone, and the cancel would be lost."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def make_server(
    more: Sequence[tuple[str, int]] = (),
    *,
    shares_port: bool = False,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """A server with our options, bound to nothing yet. Call it on the event loop.

    Args:
        more: options besides SERVER_OPTIONS.
        shares_port: as for `bind`.
        max_message_bytes: larger ones are refused before they are received.
    """
    options = {
        **dict(SERVER_OPTIONS),
        **dict(more),
        "grpc.so_reuseport": int(shares_port),
        "grpc.max_receive_message_length": max_message_bytes,
    }
    return grpc.aio.server(options=tuple(options.items()))


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    certificates: tls.Certificates | None = None,
    *,
    shares_port: bool = False,
    knob: str = PORT,
) -> int:
    """Binds, with TLS if there are certificates to show, and returns the port, which port 0
    leaves to the system.

    Args:
        shares_port: with other processes, which the kernel deals connections out to; somebody has
            it `reserved`. A second server otherwise is refused.
        knob: the flag that chose the port, for the sentence.
    Raises:
        ConfigError: one sentence, such as that the port is taken.
    """
    address = join_address(host, port)
    if not shares_port:
        _check_free(host, port, f"{knob}: cannot listen on {address}")
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.server_credentials(certificates))
    except RuntimeError as error:
        raise ConfigError(f"{knob}: cannot listen on {address}") from error


def _check_free(host: str, port: int, refusal: str) -> None:
    """grpcio does not say why it cannot listen, but writes a line of its own to stderr."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigError(f"{refusal}: {error.strerror}") from error


@contextmanager
def reserved(host: str, port: int, *, knob: str = PORT) -> Iterator[int]:
    """Keeps a port from everybody but those who share it, while inside; gives its number, which
    port 0 leaves to the system.

    Args:
        knob: the flag that chose the port, for the sentence.
    Raises:
        ConfigError: it is taken, perhaps by others who share it.
    """
    with _holder(host, port, knob) as holder:
        yield int(holder.getsockname()[1])


def _holder(host: str, port: int, knob: str) -> socket.socket:
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        holder = socket.socket(family, kind)
        try:
            # As a listener would: connections of one that has ended do not count.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(where)
            # From here on it lets in who shares, and nobody else; never listening, it gets no
            # connection itself.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            holder.close()
            raise
    except OSError as error:
        address = join_address(host, port)
        raise ConfigError(f"{knob}: cannot listen on {address}: {error.strerror}") from error
    return holder


def join_address(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(address: str) -> str:
    """Returns `address` if it is host:port, and nothing else that gRPC would resolve.

    Raises:
        InvalidRequest: otherwise.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise InvalidRequest(f"not an address of the form host:port: {address[:100]!r}")
    return address


def make_channel(
    address: str,
    certificates: tls.Certificates | None = None,
    identity: Identity | None = None,
) -> grpc.aio.Channel:
    """A channel of its own connection to host:port. The caller closes it.

    Args:
        certificates: over TLS if there is a `ca` among them, which the other side is checked by.
        identity: shown to nodes, which must prove theirs.
    """
    channel: grpc.aio.Channel
    if certificates is None or certificates.config.ca is None:
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    else:
        channel = TlsChannel(address, certificates, CHANNEL_OPTIONS)
    return channel if identity is None else SigningChannel(channel, identity)


@asynccontextmanager
async def rpc_errors(context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[None]:
    """Ends the call with the status and sentence of a ServingError raised inside. Any other
    exception is our fault: it goes to the log, and the caller gets INTERNAL."""
    try:
        yield
    except ServingError as error:
        await context.abort(error.status, str(error))
    except grpc.aio.BaseError:
        raise
    except NotImplementedError:  # of generated code: a method that a library's servicer leaves out
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method is not served here")
    except Exception as error:
        log_of_faults.error("a call failed by a fault of this program", exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see this program's log")


# Given the context of a call: who makes it, as its servicer knows callers. Raises ServingError.
Admit: TypeAlias = Callable[[Any], Awaitable[Any]]


class Guard(Protocol):
    """Who may make calls, asked before anything that a caller says is received."""

    def of(self, method: str) -> Admit:
        """
        Args:
            method: its full name.
        Raises:
            KeyError: there is no rule for it.
        """


class Admitted:
    """The context of a call, and who has made it."""

    def __init__(self, context: "grpc.aio.ServicerContext[Any, Any]", caller: Any) -> None:
        self.caller = caller
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _Recorder:
    """Stands in for a server while generated code registers a service."""

    def __init__(self) -> None:
        self.services: dict[str, Mapping[str, Any]] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.services[service] = handlers

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The same methods again."""


def add_service(
    server: grpc.aio.Server,
    add: Callable[[S, Any], None],
    servicer: S,
    guard: Guard | None = None,
    *,
    max_fields: int = MAX_FIELDS,
) -> tuple[str, ...]:
    """Registers a service, with a guard, tolerant decoding and `rpc_errors` around every method.
    Methods are given an `Admitted` for a context.

    Args:
        add: the generated `add_XServicer_to_server`.
        guard: None: callers are not asked who they are.
        max_fields: of one message; what has more is refused before it is parsed.
    Returns:
        The full names of what was registered, for reflection and health.
    Raises:
        KeyError: the guard knows no rule for a method.
    """
    recorder = _Recorder()
    add(servicer, recorder)
    for service, handlers in recorder.services.items():
        guarded = {
            name: _guarded(handler, _admission(handler, guard, f"/{service}/{name}"), max_fields)
            for name, handler in handlers.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))
    return tuple(recorder.services)


def _admission(handler: Any, guard: Guard | None, method: str) -> Admit:
    if guard is not None:
        return guard.of(method)
    return _nobody_asked_at_once if handler.request_streaming else _nobody_asked


async def _nobody_asked(_context: Any) -> Any:
    return ANYBODY


async def _nobody_asked_at_once(context: Any) -> Any:
    """A caller that says nothing before it has seen a proof learns at once that there is none."""
    await context.send_initial_metadata(())
    return ANYBODY


def _guarded(handler: Any, admit: Admit, max_fields: int) -> Any:
    """Of streams both ways, whatever the method has: no other kind of handler is asked before a
    message has come. On the wire they are alike."""
    parse = _bounded(handler.request_deserializer, max_fields)
    behavior = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )

    async def method(incoming: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        async with rpc_errors(context):
            admitted = Admitted(context, await admit(context))
            if handler.request_streaming:
                answer = behavior(_messages(parse, incoming), admitted)
            else:
                answer = behavior(await _message(parse, incoming), admitted)
            if inspect.isasyncgen(answer):
                async with aclosing(answer):
                    async for reply in answer:
                        await context.write(reply)
            elif handler.response_streaming:
                await answer  # it writes its replies itself
            else:
                await context.write(await answer)

    # Without a deserialiser it gives bytes.
    return grpc.stream_stream_rpc_method_handler(method, None, handler.response_serializer)


def _bounded(parse: Any, max_fields: int) -> Callable[[bytes], Any]:
    """
    Args:
        parse: `FromString` of a message's class.
    """
    fields = FieldCounter(parse.__self__.DESCRIPTOR, max_fields)

    def parsed(data: bytes) -> Any:
        if fields.exceeded(data):
            raise InvalidRequest(f"the message has more than {max_fields} fields")
        try:
            return parse(data)
        except (DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                "not a message of this method: a field is malformed, or a string is not UTF-8"
            ) from error

    return parsed


async def _message(parse: Callable[[bytes], Any], incoming: AsyncIterator[bytes]) -> Any:
    async for data in incoming:
        return parse(data)
    raise InvalidRequest("the call came without a message")


async def _messages(parse: Callable[[bytes], Any], incoming: AsyncIterator[bytes]) -> Any:
    async for data in incoming:
        yield parse(data)


def add_health_and_reflection(
    server: grpc.aio.Server, services: Sequence[str], guard: Guard | None = None
) -> "Health":
    """Makes `services` visible to clients without proto files, and their health to probes.

    Args:
        guard: of reflection; health is for everybody.
    """
    servicer = _HealthServicer()
    add_service(server, health_pb2_grpc.add_HealthServicer_to_server, servicer)
    told = reflection.servicer((*services, health.SERVICE_NAME))
    add_service(server, reflection.add_to_server, told, guard)
    return Health(servicer, services)


class _HealthServicer(health.aio.HealthServicer):
    """With few watchers. Probes only check, and are never refused."""

    def __init__(self) -> None:
        super().__init__()
        self._num_watchers = 0

    async def Watch(self, request: Any, context: Any) -> None:
        """RESOURCE_EXHAUSTED to one too many."""
        if self._num_watchers >= MAX_HEALTH_WATCHERS:
            raise Overloaded(f"{MAX_HEALTH_WATCHERS} watch the health of this program already")
        self._num_watchers += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watchers -= 1


class Health:
    """The answer of the gRPC health service, alike for the server ("") and each service of it."""

    def __init__(self, servicer: Any, services: Sequence[str]) -> None:
        self.servicer = servicer
        self._names = ("", *services)
        self._serving: bool | None = None

    async def tell(self, serving: bool) -> None:
        """Tells probes and watchers; before the first call no service is known to them."""
        if serving == self._serving:
            return
        self._serving = serving
        response = health_pb2.HealthCheckResponse
        now = response.SERVING if serving else response.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, now)


@asynccontextmanager
async def serving_health(
    health: Health, host: str, port: int | None, *, shares_port: bool = False
) -> AsyncIterator[None]:
    """Inside, a port of its own serves `health`, never with TLS, and nothing else: for probes that
    know no TLS. None: it does not.

    Raises:
        ConfigError: as `bind`.
    """
    if port is None:
        yield
        return
    server = make_server(NODE_SERVER_OPTIONS, shares_port=shares_port)
    add_service(server, health_pb2_grpc.add_HealthServicer_to_server, health.servicer)
    bind(server, host, port, shares_port=shares_port, knob=HEALTH_PORT)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def stop(server: grpc.aio.Server, grace_s: float) -> None:
    """Refuses new calls, gives those under way `grace_s` and ends the rest.

    Waits no longer than that and a second: a connection that does not read must not hold the
    program.
    """
    try:
        await asyncio.wait_for(server.stop(grace_s), grace_s + 1.0)
    except TimeoutError:
        log.warning("connections are still open %.1f s after the server stopped", grace_s + 1.0)
