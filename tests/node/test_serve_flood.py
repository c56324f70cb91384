"""A router that says more than its decode node's engine takes."""

import asyncio

from common import rpc, serve_protocol
from common.metrics import NodeMetrics
from common.node.engine_link import EngineLink
from common.node.ipc import FrameConnection, socket_pair
from common.node.messages import CancelSubmitted, EngineReady, FrontMessage, Start
from common.node.supervision import Supervision
from decode_node.serve import ServeService
from protos import decode_pb2, decode_pb2_grpc
from tests.node.router_end import submit

FIRST = decode_pb2.ToNode(protocol_version=serve_protocol.VERSION)
NUM_MESSAGES = 80  # of 400 KB: more than HTTP/2 and the socket hold between them


def long_submit(number: int) -> decode_pb2.ToNode:
    return submit(number, range(1 << 21, (1 << 21) + 100_000))


# Seen failing with `room` taken out of ServeService._take: all of them are taken.
async def test_a_router_that_says_more_than_the_engine_takes_waits_and_hinders_no_other():
    ours, theirs = socket_pair()
    heard: list[FrontMessage] = []
    ended: list[str] = []
    engine: FrameConnection[FrontMessage] = FrameConnection(
        FrontMessage | Start, heard.append, lambda _: None
    )
    await engine.open(theirs)
    ready = asyncio.Event()
    link = EngineLink(lambda _: ready.set(), ended.append)
    await link.open(ours, Start("", 1, ""))
    engine.send(EngineReady("m", {}, "", 1 << 20, 8, 16))
    await asyncio.wait_for(ready.wait(), 10)
    serve = ServeService(
        link,
        NodeMetrics("decode"),
        Supervision(),
        None,
        serves_alone=True,
        falls_back=False,
        on_peers=lambda _: None,
    )
    server = rpc.make_server()
    port = rpc.bind(server, "127.0.0.1", 0)
    serve.register(server)
    await server.start()
    try:
        await _flood(port, engine, heard)
        assert not ended
    finally:
        await rpc.stop(server, 0.0)
        link.close()
        engine.close()


async def _flood(
    port: int, engine: "FrameConnection[FrontMessage]", heard: "list[FrontMessage]"
) -> None:
    num_written = 0
    async with rpc.make_channel(f"127.0.0.1:{port}") as channel:
        stub = decode_pb2_grpc.DecodeNodeStub(channel)
        loud, other = stub.Serve(), stub.Serve()
        for call in (loud, other):
            await call.write(FIRST)
            await call.read()
        engine._transport.pause_reading()

        async def write() -> None:
            nonlocal num_written
            for number in range(NUM_MESSAGES):
                await loud.write(long_submit(number))
                num_written += 1

        writing = asyncio.ensure_future(write())
        try:
            before = -1
            while num_written != before:
                before = num_written
                await asyncio.sleep(0.5)
            assert num_written < NUM_MESSAGES
            await other.write(decode_pb2.ToNode(cancels=[7]))
            await asyncio.sleep(0.1)
            engine._transport.resume_reading()
            async with asyncio.timeout(30):
                await writing
                while len(heard) < NUM_MESSAGES + 2:  # noqa: ASYNC110  (nobody sets an event)
                    await asyncio.sleep(0.05)
        finally:
            writing.cancel()
    assert heard.index(CancelSubmitted(2, 7)) < NUM_MESSAGES
