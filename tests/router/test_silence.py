"""Decode nodes whose fronts answer while their engines stand still: they stop beating."""

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from common.config import RouterConfig
from common.process.standstill import Standstill
from protos.decode_pb2 import FINISH_REASON_STOP
from router.cluster.engine_pulse import EnginePulse, Patience
from router.process.assembly import Running
from tests.router.rig import collect, eventually, router_for
from tests.router.test_replay import PROMPT, ask, two_nodes
from tests.support.stub_decode_node import StubDecodeNode

KNOBS = {"silent_s": 1.0, "dead_s": 1000.0}  # the stubs beat five times a second


def _usable(router: Running) -> list[str]:
    return [choice.address for choice in router.cluster.usable()]


async def test_nothing_is_placed_on_a_node_that_does_not_beat_until_it_does(model: Path) -> None:
    """Seen failing with `moves` always true."""
    async with two_nodes(model, **KNOBS) as (client, router, d0, d1):
        live = ask(client)
        number = (await d0.submitted()).request
        d0.moves = False
        await eventually(lambda: _usable(router) == [d1.address])
        for _ in range(4):
            call = ask(client)
            d1.say(ended={(await d1.submitted()).request: FINISH_REASON_STOP})
            await collect(call)
        d0.moves = True
        await eventually(lambda: len(_usable(router)) == 2)
        # What was there waits, and nobody has done it twice.
        d0.say({number: [20]}, ended={number: FINISH_REASON_STOP})
        assert (await collect(live))[1] == [20]


async def test_requests_of_a_node_that_has_not_beaten_for_long_go_on_at_another(
    model: Path,
) -> None:
    """Seen failing with `_end_if_dead` doing nothing."""
    async with two_nodes(model, silent_s=1.0, dead_s=1.5) as (client, router, d0, d1):
        call = ask(client, max_tokens=9)
        number = (await d0.submitted()).request
        d0.say({number: [20, 21]})
        assert list((await call.read()).token_ids) == [20, 21]
        d0.moves = False
        again = await d1.submitted()
        assert list(again.token_ids) == [*PROMPT, 20, 21]
        d0.say({number: [99]}, ended={number: FINISH_REASON_STOP})  # too late
        d1.say({again.request: [22]}, ended={again.request: FINISH_REASON_STOP})
        assert (await collect(call))[1] == [22]
        # It is connected with again, and still gets nothing.
        await eventually(lambda: d0.streams)
        await eventually(lambda: router.cluster._clients[d0.address].status is not None)
        assert _usable(router) == [d1.address]
        d0.moves = True
        await eventually(lambda: len(_usable(router)) == 2)


async def test_a_silent_node_without_requests_keeps_its_stream(model: Path) -> None:
    async with two_nodes(model, silent_s=0.4, dead_s=0.5) as (_, router, d0, _d1):
        (stream,) = d0.streams
        d0.moves = False
        client = router.cluster._clients[d0.address]
        await eventually(lambda: not client.moves)
        pulse = client._pulse
        assert pulse is not None
        await asyncio.wait_for(pulse.until_dead(), 60)
        await asyncio.sleep(0)
        assert d0.streams == [stream]
        d0.moves = True
        await eventually(lambda: client.moves)


async def test_a_node_that_has_never_beaten_gets_nothing(model: Path) -> None:
    """Seen failing with a pulse that moves from the start."""
    async with StubDecodeNode() as node:
        node.moves = False
        async with router_for(model, decode=[node.address]) as (_, router):
            await eventually(lambda: node.num_described)
            await eventually(lambda: router.cluster._clients[node.address].status is not None)
            assert _usable(router) == []
            node.moves = True
            await eventually(lambda: _usable(router) == [node.address])


def test_time_in_which_the_router_itself_stood_still_is_no_silence_of_others() -> None:
    """Seen failing with the time between two looks counted in full."""
    now = 0.0
    standstill = Standstill(0.5, now=lambda: now)
    now = 600.0
    assert standstill.look() == 1.0
    now = 600.5
    assert standstill.look() == 1.5
    standstill.moved()
    now = 601.0
    assert standstill.look() == 0.5


async def test_a_change_is_told_once() -> None:
    told = []
    pulse = EnginePulse(Patience(0.01, 0.02), lambda: told.append(pulse.moves))
    assert not pulse.moves
    for _ in range(3):
        pulse.beat()
    await asyncio.wait_for(pulse.until_dead(), 60)
    await asyncio.wait_for(pulse.until_dead(), 60)
    pulse.beat()
    assert told == [True, False, True]


def test_a_node_is_not_dead_before_it_is_silent() -> None:
    with pytest.raises(ValidationError, match="must not be less than --silent-s"):
        RouterConfig(model="m", silent_s=5.0, dead_s=4.0)
