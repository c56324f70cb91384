"""gRPC servers for tests, and calls that are rejected while the caller writes."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from common import rpc
from common.rpc import RpcGuard
from common.tls import Certificates

Service = tuple[Callable[..., None], Any]  # function that registers a servicer, and it

SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "baton.v1.Router"}],
            "waitForReady": True,
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}
OPTIONS = (("grpc.service_config", json.dumps(SERVICE_CONFIG)),)


def end_of_stream(address: str, method: str, said: bytes) -> tuple[grpc.StatusCode, str]:
    """Send a message immediately, and return status and message of the rejection. Blocks.

    Not over grpc.aio, which replaces a status that arrives during a write by INTERNAL.
    """
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(method)(iter([said]), timeout=60)
        try:
            for _ in call:
                raise AssertionError("it is answered")
        except grpc.RpcError as error:
            return error.code(), error.details()
    raise AssertionError("it is not refused")


@asynccontextmanager
async def serving(
    *services: Service,
    port: int = 0,
    certificates: Certificates | None = None,
    guard: RpcGuard | None = None,
) -> AsyncIterator[str]:
    """Serve on this host while inside the context. Yields the address."""
    server = rpc.make_server()
    for add, servicer in services:
        rpc.add_service(server, add, servicer, guard)
    port = rpc.bind(server, "127.0.0.1", port, certificates)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await rpc.stop(server, 0.0)


async def status_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call and its details, "" if it succeeded."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
