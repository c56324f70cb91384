"""The parts of a frontend that need no process: streams, exit codes, signs of life, log lines."""

import asyncio
import gc

import grpc
import grpc.aio
import pytest
from grpc.aio import Metadata

from common.errors import Overloaded, ProtocolViolation, ServingError
from common.logs import kv
from common.rpc import streams as words
from common.rpc.streams import OutgoingStream
from node.frontend.engine_link import EngineSupervisor
from node.frontend.tenure import ProcessExit
from node.messages import EngineReady, EngineStats
from protos import decode_pb2

READY = EngineReady("m", {}, "t", 64, 8, 16)


def test_an_engine_is_ready_while_it_reports():
    node = EngineSupervisor(silence_s=3.0)
    assert node.state(0.0) == "starting"
    node.started(READY, 10.0)
    assert node.state(12.9) == "ready"
    assert node.state(13.1) == "unhealthy"
    node.moved(EngineStats(1, {}, "ready", ()), 14.0)
    assert node.state(16.9) == "ready"
    node.draining = True
    assert node.state(16.9) == "draining"


def test_an_engine_with_heartbeats_during_a_long_step_needs_no_report():
    node = EngineSupervisor(silence_s=3.0)
    node.started(READY, 0.0)
    for second in range(1, 30):
        node.heartbeat(float(second), late_s=0.0)
    assert node.state(31.9) == "ready"
    assert node.state(32.1) == "unhealthy"


def test_an_engine_that_reports_a_lag_counts_as_silent_since_then():
    node = EngineSupervisor(silence_s=3.0)
    node.started(READY, 0.0)
    node.heartbeat(10.0, late_s=2.0)
    assert node.state(10.9) == "ready"
    assert node.state(11.1) == "unhealthy"


def message(size: int = 0) -> decode_pb2.FromNode:
    return decode_pb2.FromNode(status=decode_pb2.Status(state="x" * size))


class Wire:
    """A silent peer, which reads messages while `reads` is set."""

    def __init__(self) -> None:
        self.written: list[decode_pb2.FromNode] = []
        self.reads = asyncio.Event()
        self.says: asyncio.Queue[str | None] = asyncio.Queue()

    async def write(self, message: decode_pb2.FromNode) -> None:
        await self.reads.wait()
        self.written.append(message)

    async def incoming(self):
        while (said := await self.says.get()) is not None:
            yield said


@pytest.mark.parametrize("limits", [{"max_messages": 3}, {"max_bytes": 1900}])
async def test_a_peer_that_does_not_read_is_disconnected_at_the_limit(limits):
    wire, outgoing = Wire(), OutgoingStream(**limits)
    talk = asyncio.ensure_future(outgoing.converse(wire.write, wire.incoming(), print))
    for _ in range(4):
        outgoing.put(message(600))
    with pytest.raises(Overloaded, match="does not read"):
        await asyncio.wait_for(talk, 60)
    assert outgoing.cut_off


def last_words(error: ServingError) -> decode_pb2.FromNode:
    return decode_pb2.FromNode(last_words=words.said(error))


# Each seen failing if its own way to end sends no last message.
@pytest.mark.parametrize("how", ["end", "close", "take"])
async def test_the_reason_of_an_end_is_the_last_message_of_the_stream(how: str):
    wire, outgoing = Wire(), OutgoingStream(last_words=last_words)
    error = ProtocolViolation("because")

    async def take(said: str) -> None:
        raise error

    talk = asyncio.ensure_future(outgoing.converse(wire.write, wire.incoming(), take))
    outgoing.put(message())
    match how:
        case "take":
            wire.says.put_nowait("bad")
        case _:
            getattr(outgoing, how)(error)
            outgoing.put(message(99))  # not sent after an end
    wire.reads.set()
    with pytest.raises(ProtocolViolation, match="because"):
        await asyncio.wait_for(talk, 60)
    assert wire.written[-1] == last_words(error)
    assert how != "close" or wire.written[:-1] == [message()]


async def test_a_conversation_that_is_cancelled_twice_leaves_no_task():
    """gRPC does so if the peer disconnects while the conversation ends."""
    wire, outgoing = Wire(), OutgoingStream()
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, reported: complaints.append(reported)
    )
    writing = asyncio.Event()

    async def write(message: decode_pb2.FromNode) -> None:
        writing.set()
        try:
            await wire.reads.wait()
        finally:
            raise ConnectionError("the peer has gone")

    talk = asyncio.ensure_future(outgoing.converse(write, wire.incoming(), print))
    outgoing.put(message())
    await asyncio.wait_for(writing.wait(), 60)
    talk.cancel()
    await asyncio.sleep(0)
    talk.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talk
    wire.reads.set()
    if left := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(left, timeout=60)
    del left
    gc.collect()
    assert complaints == []


async def test_an_error_of_take_ends_the_stream_and_a_peers_end_returns():
    wire = Wire()
    heard: list[str] = []

    async def take(said: str) -> None:
        heard.append(said)
        if said == "bad":
            raise ProtocolViolation(said)

    for said in ("a", None):
        wire.says.put_nowait(said)
    await asyncio.wait_for(OutgoingStream().converse(wire.write, wire.incoming(), take), 60)
    for said in ("b", "bad", "c"):
        wire.says.put_nowait(said)
    with pytest.raises(ProtocolViolation):
        await asyncio.wait_for(OutgoingStream().converse(wire.write, wire.incoming(), take), 60)
    assert heard == ["a", "b", "bad"]


async def test_an_error_overrides_a_requested_drain_and_the_first_exit_code_stands():
    ending = ProcessExit()
    begun = asyncio.Event()
    ending.want("a test")
    ending.want("a test again")
    waiting = asyncio.ensure_future(ending.verdict(begun.set, 30.0))
    await asyncio.wait_for(begun.wait(), 60)
    ending.fault("broken")
    ending.drained()
    verdict = await asyncio.wait_for(waiting, 60)
    assert (verdict.reason, verdict.exit_code) == ("broken", 1)


def test_a_clients_text_cannot_forge_a_log_field_or_line():
    assert str(kv(a="x", b=1, c=2.5)) == "a=x b=1 c=2.5"
    assert str(kv(id="x y=1\nERROR")) == 'id="x y=1\\nERROR"'
    assert str(kv(id='"')) == 'id="\\""'
    assert str(kv(id="ü")) == 'id="\\xfc"'
    assert str(kv(id="")) == 'id=""'
    assert len(str(kv(id="x" * 10_000))) < 400
    plain = "".join(map(chr, range(33, 127)))
    for character in " ='\"\\":
        plain = plain.replace(character, "")
        assert str(kv(id=f"a{character}b")).startswith('id="a')
    assert str(kv(id=plain)) == f"id={plain}"


async def test_an_orderly_end_is_recognized_although_its_status_is_lost():
    """Seen failing without the last message: an INTERNAL of grpc.aio replaced OK."""

    async def messages():
        yield decode_pb2.FromNode(last_words=words.ORDERLY_END)
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, Metadata(), Metadata(), "Internal error from Core"
        )

    assert [message async for message in words.heard(messages())] == []
