"""A router that sends more than its decode node's engine handles, or nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from common import limits, rpc
from common.process.ipc import FrameConnection, socket_pair
from decode_node.servicer import DecodeAbilities, DecodeService
from node.frontend.engine_link import EngineLink, EngineSupervisor
from node.messages import CancelSubmitted, EngineReady, FrontMessage, StartRole
from node.metrics import NodeMetrics
from protos import decode_pb2, decode_pb2_grpc
from tests.node.frontend.router_end import submit
from tests.support.network import grpc_calls

FIRST = decode_pb2.ToNode(protocol_version=limits.VERSION)
NUM_MESSAGES = 80  # of 400 KB: more than HTTP/2 and the socket hold between them


def long_submit(number: int) -> decode_pb2.ToNode:
    return submit(number, range(1 << 21, (1 << 21) + 100_000))


@dataclass
class Rig:
    address: str
    link: EngineLink
    engine: "FrameConnection[FrontMessage]"
    heard: list[FrontMessage]
    ended: list[str]


@contextlib.asynccontextmanager
async def serving(first_message_s: float = 30.0) -> AsyncIterator[Rig]:
    """A DecodeService. The test plays its engine."""
    ours, theirs = socket_pair()
    heard: list[FrontMessage] = []
    ended: list[str] = []
    engine: FrameConnection[FrontMessage] = FrameConnection(
        FrontMessage | StartRole, heard.append, lambda _: None
    )
    await engine.open(theirs)
    ready = asyncio.Event()
    link = EngineLink(ended.append)
    link.on_notice = lambda _: ready.set()
    await link.open(ours, StartRole("decode", "", 1, ""))
    engine.send(EngineReady("m", {}, "", 1 << 20, 8, 16))
    await asyncio.wait_for(ready.wait(), 60)
    serve = DecodeService(
        link,
        NodeMetrics("decode"),
        EngineSupervisor(),
        None,
        abilities=DecodeAbilities(serves_alone=True, falls_back=False, fetches=True),
        on_peers=lambda prefill, decode: None,
        first_message_s=first_message_s,
    )
    async with grpc_calls.serving(
        (decode_pb2_grpc.add_DecodeNodeServicer_to_server, serve)
    ) as address:
        yield Rig(address, link, engine, heard, ended)
    link.close()
    engine.close()


# Seen failing without the deadline of DecodeService._first: the call continues.
async def test_a_silent_router_is_disconnected():
    async with serving(first_message_s=0.1) as rig:
        async with rpc.make_channel(rig.address) as channel:
            call = decode_pb2_grpc.DecodeNodeStub(channel).Serve()
            assert await asyncio.wait_for(call.code(), 60) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call.details() == "no message on Serve within 0.1 s"


# Seen failing without `room` in DecodeService._take: all of them are accepted, 80 < 80.
async def test_a_router_that_sends_more_than_the_engine_handles_waits_and_delays_no_other():
    async with serving() as rig:
        await _flood(rig)
        assert not rig.ended


# Seen failing if streams count only after their first message.
async def test_streams_that_start_together_are_counted_together(monkeypatch):
    monkeypatch.setattr("decode_node.servicer.MAX_STREAMS", 1)
    async with serving() as rig, rpc.make_channel(rig.address) as channel:
        stub = decode_pb2_grpc.DecodeNodeStub(channel)
        one, other = stub.Serve(), stub.Serve()
        for call in (one, other):
            await call.initial_metadata()
        await one.write(FIRST)
        await one.read()
        await other.write(FIRST)
        with pytest.raises(grpc.aio.AioRpcError, match="already connected"):
            await other.read()


async def _flood(rig: Rig) -> None:
    num_written = 0
    async with rpc.make_channel(rig.address) as channel:
        stub = decode_pb2_grpc.DecodeNodeStub(channel)
        loud, other = stub.Serve(), stub.Serve()
        for call in (loud, other):
            await call.write(FIRST)
            await call.read()
        rig.engine._transport.pause_reading()

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
            waiting = rig.link._connection.backlog_bytes
            await other.write(decode_pb2.ToNode(cancels=[7]))
            async with asyncio.timeout(60):
                while rig.link._connection.backlog_bytes <= waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            rig.engine._transport.resume_reading()
            async with asyncio.timeout(60):
                await writing
                while len(rig.heard) < NUM_MESSAGES + 2:  # noqa: ASYNC110  (no code sets an event)
                    await asyncio.sleep(0.05)
        finally:
            writing.cancel()
    assert rig.heard.index(CancelSubmitted(2, 7)) < NUM_MESSAGES
