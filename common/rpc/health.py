"""Health service for probes, and reflection for clients without proto files."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import Overloaded
from common.rpc import reflection
from common.rpc.options import NODE_SERVER_OPTIONS
from common.rpc.servers import HEALTH_PORT, bind, make_server, stop
from common.rpc.services import RpcGuard, add_service

MAX_HEALTH_WATCHERS = 64  # they are not authenticated and keep their connections open


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
    told = reflection.servicer((*services, health.SERVICE_NAME))
    add_service(server, reflection.add_to_server, told, guard)
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
