"""The network in memory behaves like gRPC's own: each test runs over both."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from common import rpc
from common.errors import InvalidRequest, NodeUnavailable
from protos import kvtransfer_pb2, kvtransfer_pb2_grpc, node_pb2, node_pb2_grpc
from simulation.virtual.network import MemoryHost, MemoryNetwork
from tests.support.network.grpc_calls import status_of
from tests.support.processes.cluster import free_ports

WAIT_S = 60.0


class Pairs(kvtransfer_pb2_grpc.KvTransferServicer):
    """A service whose handlers report that they have ended."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def Pair(self, messages: AsyncIterator[Any], context: Any) -> None:
        """Return each message until the caller closes its direction, or asks for an error."""
        try:
            async for message in messages:
                if message.open.id.request == 7:
                    raise NodeUnavailable("as asked")
                await context.write(kvtransfer_pb2.FromProducer())
        finally:
            self.ended.set_result(None)


class Described(node_pb2_grpc.NodeServicer):
    async def Describe(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(WAIT_S)

    async def Drain(self, request: Any, context: Any) -> Any:
        raise InvalidRequest("never")


class Rig:
    def __init__(self, port: int) -> None:
        self.pairs = Pairs()
        self.server = rpc.make_server()
        rpc.add_service(
            self.server, kvtransfer_pb2_grpc.add_KvTransferServicer_to_server, self.pairs
        )
        rpc.add_service(self.server, node_pb2_grpc.add_NodeServicer_to_server, Described())
        rpc.bind(self.server, "127.0.0.1", port)
        self.channel = rpc.make_channel(f"127.0.0.1:{port}")
        self.node: Any = node_pb2_grpc.NodeStub(self.channel)  # type: ignore[no-untyped-call]

    def pair(self) -> Any:
        stub: Any = kvtransfer_pb2_grpc.KvTransferStub(self.channel)  # type: ignore[no-untyped-call]
        return stub.Pair()


@pytest.fixture(params=["grpc", "memory"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    (port,) = free_ports(1)
    if request.param == "memory":
        with rpc.use(MemoryHost("127.0.0.1", MemoryNetwork())):
            made = Rig(port)
    else:
        made = Rig(port)
    await made.server.start()
    yield made
    await made.channel.close()
    await made.server.stop(0)


def hello(request: int = 1) -> Any:
    message = kvtransfer_pb2.FromConsumer()
    message.open.id.request = request
    return message


async def test_messages_and_half_close(rig: Rig) -> None:
    call = rig.pair()
    for _ in range(3):
        await call.write(hello())
        assert await call.read() is not grpc.aio.EOF
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await rig.pairs.ended
    assert await call.code() is grpc.StatusCode.OK
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(hello())


async def test_an_error_has_its_status_and_sentence(rig: Rig) -> None:
    call = rig.pair()
    await call.write(hello(request=7))
    assert await status_of(call.read()) == (grpc.StatusCode.UNAVAILABLE, "as asked")
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(hello())


async def test_an_error_of_a_unary_call(rig: Rig) -> None:
    code, _ = await status_of(rig.node.Drain(node_pb2.DrainRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_call(rig: Rig) -> None:
    call = rig.pair()
    await call.write(hello())
    await call.read()
    reading = asyncio.ensure_future(call.read())
    await asyncio.sleep(0)
    assert call.cancel() and not call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await rig.pairs.ended  # with gRPC, the end of the messages may come before the cancellation
    assert call.cancelled() and await call.code() is grpc.StatusCode.CANCELLED


async def test_a_deadline(rig: Rig) -> None:
    code, _ = await status_of(rig.node.Describe(node_pb2.DescribeRequest(), timeout=0.05))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_unknown_method(rig: Rig) -> None:
    call = rig.channel.unary_unary(
        "/baton.Nothing/Call", request_serializer=bytes, response_deserializer=bytes
    )
    code, _ = await status_of(call(b""))
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_server_that_stops(rig: Rig) -> None:
    call = rig.pair()
    await call.write(hello())
    await call.read()
    await rig.server.stop(0)
    for failing in (call.read(), rig.node.Drain(node_pb2.DrainRequest())):
        assert (await status_of(failing))[0] is grpc.StatusCode.UNAVAILABLE
    await rig.pairs.ended


async def test_a_channel_that_closes(rig: Rig) -> None:
    call = rig.pair()
    await call.write(hello())
    await call.read()
    await rig.channel.close()
    await rig.pairs.ended
    assert await call.code() is grpc.StatusCode.CANCELLED
