"""What the commands ask of running programs, over gRPC."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc import make_channel
from protos import router_pb2, router_pb2_grpc

_POLL_S = 0.2
_ANSWER_S = 5.0


async def until_serving(address: str, service: str) -> None:
    """Returns once the program at `address` says that `service` is healthy. Sets no deadline."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with make_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(request, timeout=_ANSWER_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # not up yet, or it does not know the service yet
            await asyncio.sleep(_POLL_S)


async def stream(
    address: str, request: router_pb2.GenerateRequest
) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
    """The answer of the router at `address`. Leaving the iteration cancels the request.

    Raises:
        grpc.aio.AioRpcError: with the router's own sentence in `details()`.
    """
    async with make_channel(address) as channel:
        stub: Any = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(request)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()
