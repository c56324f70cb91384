"""gRPC servers and their ports, the health service for probes, and reflection for clients without
proto files.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from common import tls
from common.errors import ConfigError, Overloaded
from common.rpc.channels import (
    MAX_MESSAGE_BYTES,
    NODE_SERVER_OPTIONS,
    SERVER_OPTIONS,
    current,
    join_address,
)
from common.rpc.services import RpcGuard, add_service

log = logging.getLogger(__name__)
PORT, HEALTH_PORT = "--port", "--server.health-port"  # settings, for error messages


def make_server(
    more: Sequence[tuple[str, int]] = (),
    *,
    shares_port: bool = False,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """Return a server with Baton's options, not bound yet. Call it on the event loop.

    Args:
        shares_port: see `bind`.
        max_message_bytes: larger messages are rejected before they are received.
    """
    if (network := current()) is not None:
        return network.server()
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
    flag: str = PORT,
) -> int:
    """Bind a port, with TLS if there are certificates. Returns the port.

    Args:
        server: not started yet.
        port: 0: the system chooses one.
        certificates: None: no TLS.
        shares_port: share the port with other processes. The kernel distributes connections, and
            one process keeps the port `reserved`. Otherwise a second server is rejected.
        flag: flag that chose the port, for error messages.
    Raises:
        ConfigError: for example, the port is taken.
    """
    address = join_address(host, port)
    if not shares_port and current() is None:
        with _refused(host, port, flag):
            probe(host, port).close()
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.server_credentials(certificates))
    except RuntimeError as error:
        raise ConfigError(f"{flag}: cannot listen on {address}") from error


def probe(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port and does not listen. grpcio reports no reason for a
    port that is taken, but writes a line to stderr.

    Raises:
        OSError: the port is not available.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(socket.socket(family, kind))
        # As a listener does: connections of an ended process do not block the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        stack.pop_all()
    return bound


@contextmanager
def _refused(host: str, port: int, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        address = join_address(host, port)
        raise ConfigError(f"{flag}: cannot listen on {address}: {error.strerror}") from error


@contextmanager
def reserved(host: str, port: int, *, flag: str = PORT) -> Iterator[int]:
    """Reserve a port for processes that share it, while inside the context. Yields its number.

    Args:
        port: 0: the system chooses one.
        flag: flag that chose the port, for error messages.
    Raises:
        ConfigError: the port is taken, perhaps by other processes that share it.
    """
    if current() is not None:
        yield port
        return
    with contextlib.ExitStack() as stack:
        with _refused(host, port, flag):
            holder = stack.enter_context(probe(host, port))
            # From here on, only sockets that share the port can bind it. This socket never listens
            # and gets no connections.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield int(holder.getsockname()[1])


async def stop(server: grpc.aio.Server, grace_s: float) -> None:
    """Reject new calls, give running ones `grace_s` seconds, and end the rest.

    Waits at most one second longer, so that a connection that does not read cannot block the
    process.
    """
    try:
        await asyncio.wait_for(server.stop(grace_s), grace_s + 1.0)
    except TimeoutError:
        log.warning("connections are still open %.1f s after the server stopped", grace_s + 1.0)


MAX_HEALTH_WATCHERS = 64  # watchers are not authenticated and keep their connections open
_REFLECTION_NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)


def add_health_and_reflection(
    server: grpc.aio.Server, services: Sequence[str], guard: RpcGuard | None = None
) -> "Health":
    """Add reflection of `services`, and a health service for probes.

    Args:
        server: not started yet.
        guard: for reflection. Health checks are open to all callers.
    """
    servicer = _HealthServicer()
    add_service(server, health_pb2_grpc.add_HealthServicer_to_server, servicer)
    reflected = _reflection_servicer((*services, health.SERVICE_NAME))
    add_service(server, _add_reflection, reflected, guard)
    return Health(servicer, services)


class _HealthServicer(health.aio.HealthServicer):
    """Health service with a limit of watchers. Checks are not limited."""

    def __init__(self) -> None:
        super().__init__()
        self._num_watchers = 0

    async def Watch(self, request: Any, context: Any) -> None:
        """Stream health changes. Fails with RESOURCE_EXHAUSTED if there are too many watchers."""
        if self._num_watchers >= MAX_HEALTH_WATCHERS:
            raise Overloaded(f"too many health watchers of this process ({MAX_HEALTH_WATCHERS})")
        self._num_watchers += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watchers -= 1


class Health:
    """Health status: the same for the server ("") and each service, unless set for one service."""

    def __init__(self, servicer: Any, services: Sequence[str]) -> None:
        self.servicer = servicer
        self._names = ("", *services)
        self._serving: bool | None = None

    async def set_serving(self, serving: bool) -> None:
        """Send the status to probes and watchers.

        Before the first call, they get the status that the service is unknown.
        """
        if serving == self._serving:
            return
        self._serving = serving
        for name in self._names:
            await self.set_service(name, serving)

    async def set_service(self, service: str, serving: bool) -> None:
        """Send the status of one service only."""
        response = health_pb2.HealthCheckResponse
        now = response.SERVING if serving else response.NOT_SERVING
        await self.servicer.set(service, now)


@asynccontextmanager
async def serving_health(
    health: Health, host: str, port: int | None, *, shares_port: bool = False
) -> AsyncIterator[None]:
    """Serve `health` on a separate port while inside the context, for probes without TLS.

    The port never uses TLS and serves nothing else. None: no port.

    Raises:
        ConfigError: as `bind`.
    """
    if port is None:
        yield
        return
    server = make_server(NODE_SERVER_OPTIONS, shares_port=shares_port)
    add_service(server, health_pb2_grpc.add_HealthServicer_to_server, health.servicer)
    bind(server, host, port, shares_port=shares_port, flag=HEALTH_PORT)
    await server.start()
    try:
        yield
    finally:
        await stop(server, 0.0)


def _reflection_servicer(services: Sequence[str]) -> Any:
    """Return a servicer that lists `services` and reflection itself."""
    _describe_v1()
    return reflection.aio.ReflectionServicer((*services, *_REFLECTION_NAMES))


def _add_reflection(servicer: Any, server: Any) -> None:
    """Register the servicer under both names, like generated code.

    grpcio has v1alpha. Clients try v1 first, and newer ones try only v1. Both have the same
    messages.
    """
    add: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
    add(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers(_REFLECTION_NAMES[0], {"ServerReflectionInfo": handler})


@cache
def _describe_v1() -> None:
    """Add v1 to protobuf's descriptors, which reflection returns."""
    alpha = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
    file = text_format.Parse(text, FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
