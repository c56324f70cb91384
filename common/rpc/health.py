"""The health of a server for probes, and reflection for clients without proto files."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import Overloaded
from common.rpc import reflection
from common.rpc.options import NODE_SERVER_OPTIONS
from common.rpc.servers import HEALTH_PORT, bind, make_server, stop
from common.rpc.services import Guard, add_service

MAX_HEALTH_WATCHERS = 64  # they need not say who they are, and keep their connections


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
        await stop(server, 0.0)
