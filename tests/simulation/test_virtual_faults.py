"""Faults in virtual time: what they do to calls, links and responses."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from common import rpc
from protos import kvtransfer_pb2, kvtransfer_pb2_grpc
from simulation.node.link import HEALTHY, Wire
from simulation.virtual.clock import VirtualClock
from simulation.virtual.faults import KEEPALIVE_S, Wires
from simulation.virtual.loop import VirtualLoop
from simulation.virtual.network import LATENCY_S, MemoryHost, MemoryNetwork
from tests.simulation.test_virtual import report, written
from tests.support.runner.isolation import ROOT

TO_SERVER, TO_CLIENT = ("client", "server"), ("server", "client")
ADDRESS = "127.0.0.1:1"


class Echo(kvtransfer_pb2_grpc.KvTransferServicer):
    """Returns each message at once.

    Attributes:
        ended: set when a handler has ended.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Pair(self, messages: AsyncIterator[Any], context: Any) -> None:
        try:
            async for _ in messages:
                await context.write(kvtransfer_pb2.FromProducer())
        finally:
            self.ended.set()


class Rig:
    """A client and a server on a network of their own."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.echo = Echo()
        with rpc.use(MemoryHost("server", self.network)):
            self.server = rpc.make_server()
            add = kvtransfer_pb2_grpc.add_KvTransferServicer_to_server
            rpc.add_service(self.server, add, self.echo)
            rpc.bind(self.server, "127.0.0.1", 1)
        with rpc.use(MemoryHost("client", self.network)):
            self.channel = rpc.make_channel(ADDRESS)

    def fail(self, wire: Wire, seconds: float, *ends: tuple[str, str]) -> None:
        """Start a fault at the next turn of the loop."""
        self._fault = asyncio.ensure_future(self.network.wires.fail(ends, wire, seconds))

    def call(self) -> Any:
        return kvtransfer_pb2_grpc.KvTransferStub(self.channel).Pair()  # type: ignore[no-untyped-call]

    async def round_trip_s(self, call: Any) -> float:
        """Send a message, and return the time until its echo."""
        begin = time.monotonic()
        await call.write(kvtransfer_pb2.FromConsumer())
        assert await call.read() is not grpc.aio.EOF
        return time.monotonic() - begin


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time."""

    def run(clock: VirtualClock, **arguments: Any) -> None:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
            runner.run(test(**arguments))

    given = list(inspect.signature(test).parameters.values())
    clock = inspect.Parameter("clock", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([clock, *given])  # type: ignore[attr-defined]
    return run


async def connected() -> tuple[Rig, Any]:
    """Return a client and a server, and a call between them."""
    rig = Rig()
    await rig.server.start()
    call = rig.call()
    await rig.round_trip_s(call)
    return rig, call


@virtually
async def test_faults_of_the_same_direction_add_up_and_end() -> None:
    wires = Wires()
    slow = asyncio.ensure_future(wires.fail([TO_SERVER], Wire(factor=3), 5))
    cut = asyncio.ensure_future(wires.fail([TO_SERVER], Wire(factor=2, is_cut=True), 3))
    await asyncio.sleep(1)
    assert wires.wire(*TO_SERVER) == Wire(6, is_cut=True)
    assert wires.wire(*TO_CLIENT) == HEALTHY
    assert wires.both(*TO_CLIENT) == Wire(6, is_cut=True)
    await cut
    assert wires.wire(*TO_SERVER) == Wire(3)
    await slow
    assert wires.wire(*TO_SERVER) == HEALTHY


@virtually
async def test_a_cut_ends_both_sides_and_refuses_new_calls() -> None:
    rig, call = await connected()
    rig.fail(Wire(is_cut=True), 2, TO_SERVER, TO_CLIENT)
    with pytest.raises(grpc.aio.AioRpcError, match="Socket closed"):
        await call.read()
    await rig.echo.ended.wait()
    with pytest.raises(grpc.aio.AioRpcError, match="failed to connect"):
        await rig.call().read()
    await asyncio.sleep(2)
    assert await rig.round_trip_s(rig.call()) < 0.01


@pytest.mark.parametrize("ends", [TO_SERVER, TO_CLIENT])
@virtually
async def test_packets_that_vanish_for_a_short_time_arrive_later(ends: Any) -> None:
    rig, call = await connected()
    rig.fail(Wire(is_silent=True), 3, ends)
    await asyncio.sleep(0)
    assert 3 <= await rig.round_trip_s(call) < 3.5
    assert await rig.round_trip_s(call) < 0.01


@pytest.mark.parametrize("ends", [TO_SERVER, TO_CLIENT])
@virtually
async def test_pings_end_a_connection_whose_packets_vanish(ends: Any) -> None:
    rig, call = await connected()
    rig.fail(Wire(is_silent=True), 60, ends)
    begin = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError, match="Socket closed"):
        await call.read()
    await rig.echo.ended.wait()
    assert time.monotonic() - begin == pytest.approx(KEEPALIVE_S)
    with pytest.raises(grpc.aio.AioRpcError, match="failed to connect"):
        await rig.call().read()
    assert time.monotonic() - begin == pytest.approx(2 * KEEPALIVE_S, rel=0.05)


@virtually
async def test_a_server_is_not_informed_of_a_cancelled_call_over_a_silent_wire() -> None:
    rig, call = await connected()
    rig.fail(Wire(is_silent=True), 4, TO_SERVER)
    await asyncio.sleep(1)
    assert call.cancel()
    await asyncio.sleep(2)
    assert not rig.echo.ended.is_set()
    await asyncio.sleep(2)
    assert rig.echo.ended.is_set()
    assert not rig.network.wires.connections


@virtually
async def test_a_slow_wire_delays_messages() -> None:
    rig, call = await connected()
    rig.fail(Wire(factor=1000), 5, TO_SERVER)
    await asyncio.sleep(0)
    assert await rig.round_trip_s(call) == pytest.approx(1001 * LATENCY_S)


CLUSTER = """
cluster: {gpu: h100, model: llama-3-8b, prefill: 2, decode: 2}
load: {rate: 4, input: 400, output: 60, requests: 40}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "longest_s"),
    [
        # Requests continue on other nodes at once.
        ("{cut: [router, decode/0], at: 2, seconds: 5}", (0, 0.1)),
        ("{cut: [prefill/0, decode/0], at: 2, seconds: 5}", (0, 0.1)),
        ("{cut: [router, prefill/0], at: 2, seconds: 5}", (0, 0.1)),
        # Missed heartbeats of the pair, then of the node.
        ("{half_open: [prefill/0, decode/0], at: 2, seconds: 30}", (1, 6)),
        ("{half_open: [decode/0, prefill/0], at: 2, seconds: 30}", (1, 6)),
        ("{half_open: [decode/0, router], at: 2, seconds: 30}", (5, 16)),
        ("{half_open: [router, decode/0], at: 2, seconds: 30}", (5, 16)),
        # Packets arrive late.
        ("{half_open: [decode/0, router], at: 2, seconds: 3}", (2.9, 3.5)),
        ("{slow_link: [prefill/0, decode/0], factor: 1000, at: 2, seconds: 9}", (0.1, 5)),
        ("{slow_device: decode/0, factor: 20, at: 2, seconds: 9}", (0.1, 0.5)),
    ],
)
def test_every_response_is_right(tmp_path: Path, fault: str, longest_s: tuple[int, int]) -> None:
    found = report(written(tmp_path, f"{CLUSTER}faults: [{fault}]\n"))
    assert (found["right"], found["wrong"], found["errors"]) == (40, 0, {})
    least, most = longest_s
    assert least < max(found["itl"]["max"], found["ttft"]["max"]) < most


@pytest.mark.long
def test_the_example_of_the_documentation_loses_no_request() -> None:
    found = report(ROOT / "docs" / "assets" / "sim-faults.yaml")
    assert (found["right"], found["wrong"], found["errors"]) == (120, 0, {})
