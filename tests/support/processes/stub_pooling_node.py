"""A stub prefill node for pooling. Vectors: number of tokens, and the first token."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
import numpy as np

from common import rpc
from common.errors import ServingError
from protos import pooling_pb2, pooling_pb2_grpc
from tests.support.processes.stub_decode_node import StubNode

Vector = Callable[[list[int]], list[float]]


class StubPoolingNode(StubNode, pooling_pb2_grpc.PoolingServicer):
    """A stub of a pooling node, with the arguments of StubNode.

    Attributes:
        fails: error raised by every call, or None.
        pooling: while cleared, calls wait.
        calls: all calls received. num_cancelled: number of calls that were cancelled.
    """

    def __init__(self, vector: Vector = lambda ids: [len(ids), ids[0]], **how: Any) -> None:
        super().__init__(**how)
        self.vector = vector
        self.fails: ServingError | None = None
        self.pooling = asyncio.Event()
        self.pooling.set()
        self.calls: list[pooling_pb2.PoolRequest] = []
        self.num_cancelled = 0

    async def Pool(self, request: pooling_pb2.PoolRequest, context: Any) -> Any:
        self.calls.append(request)
        if self.fails is not None:
            raise self.fails
        try:
            await self.pooling.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        vectors = [self.vector(list(prompt.ids)) for prompt in request.prompts]
        return pooling_pb2.PoolResponse(
            vectors=[np.array(vector, "<f4").tobytes() for vector in vectors]
        )

    def _add_services(self, server: grpc.aio.Server) -> None:
        super()._add_services(server)
        rpc.add_service(server, pooling_pb2_grpc.add_PoolingServicer_to_server, self)
