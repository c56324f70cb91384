"""Health service for probes, and reflection for clients without proto files."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from common.errors import Overloaded
from common.rpc.options import NODE_SERVER_OPTIONS
from common.rpc.servers import HEALTH_PORT, bind, make_server, stop
from common.rpc.services import RpcGuard, add_service

MAX_HEALTH_WATCHERS = 64  # they are not authenticated and keep their connections open
_REFLECTION_NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)


def add_health_and_reflection(
    server: grpc.aio.Server, services: Sequence[str], guard: RpcGuard | None = None
) -> "Health":
    """Add reflection of `services`, and a health service for probes.

    Args:
        server: not started yet.
        services: full names.
        guard: for reflection. Health is open to all callers.
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
        """Stream health changes. RESOURCE_EXHAUSTED if there are too many watchers."""
        if self._num_watchers >= MAX_HEALTH_WATCHERS:
            raise Overloaded(f"too many health watchers of this process ({MAX_HEALTH_WATCHERS})")
        self._num_watchers += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watchers -= 1


class Health:
    """Health status, the same for the server ("") and each of its services."""

    def __init__(self, servicer: Any, services: Sequence[str]) -> None:
        self.servicer = servicer
        self._names = ("", *services)
        self._serving: bool | None = None

    async def tell(self, serving: bool) -> None:
        """Send the status to probes and watchers.

        Before the first call, no service is known to them.
        """
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
    bind(server, host, port, shares_port=shares_port, knob=HEALTH_PORT)
    await server.start()
    try:
        yield
    finally:
        await stop(server, 0.0)


def _reflection_servicer(services: Sequence[str]) -> Any:
    """Return a servicer that lists `services` and reflection itself.

    Args:
        services: full names.
    """
    _describe_v1()
    return reflection.aio.ReflectionServicer((*services, *_REFLECTION_NAMES))


def _add_reflection(servicer: Any, server: Any) -> None:
    """Register the servicer under both names, like generated code.

    grpcio has v1alpha. Clients try v1 first, and newer ones try only that. Both have the same
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


def _describe_v1() -> None:
    """Add v1 to protobuf's descriptors, which reflection returns. Idempotent."""
    alpha = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
    file = text_format.Parse(text, FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
