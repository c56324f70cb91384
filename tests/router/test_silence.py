"""Decode nodes whose fronts answer while their engines stand still: they stop beating."""

import asyncio
import math

import pytest
from pydantic import ValidationError

from api.program.assembly import RunningRouter
from common.config import RouterConfig
from common.process.standstill import StallMonitor
from router.cluster import cluster
from router.cluster.decode_client import EngineLiveness, LivenessLimits
from tests.api.rig import (
    PROMPT,
    ask,
    collect,
    eventually,
    failure,
    router_for,
    served,
    submitted_or_over,
    two_nodes,
    usable,
)
from tests.support.stub_decode_node import StubDecodeNode

KNOBS = {"suspect_after_s": 1.0, "dead_after_s": 1000.0}  # the stubs beat five times a second


async def test_nothing_is_placed_on_a_node_that_does_not_beat_until_it_does(model):
    """Seen failing with `moves` always true."""
    async with two_nodes(model, **KNOBS) as (client, router, d0, d1):
        live = ask(client)
        number = (await d0.submitted()).number
        d0.moves = False
        await eventually(lambda: usable(router) == [d1.address])
        for _ in range(4):
            call = ask(client)
            await d1.complete()
            await collect(call)
        d0.moves = True
        await eventually(lambda: len(usable(router)) == 2)
        # What was there waits, and nobody has done it twice.
        d0.finish(number, [20])
        assert (await collect(live))[1] == [20]


async def test_requests_of_a_node_that_has_not_beaten_for_long_go_on_at_another(model):
    """Seen failing with `_end_if_dead` doing nothing."""
    async with two_nodes(model, suspect_after_s=1.0, dead_after_s=1.5) as (client, router, d0, d1):
        call = ask(client, max_tokens=9)
        number = (await d0.submitted()).number
        d0.say({number: [20, 21]})
        assert list((await call.read()).token_ids) == [20, 21]
        d0.moves = False
        again = await d1.submitted()
        assert list(again.token_ids) == [*PROMPT, 20, 21]
        d0.finish(number, [99])  # too late
        d1.finish(again.number, [22])
        assert (await collect(call))[1] == [22]
        # It is connected with again, and still gets nothing.
        await eventually(lambda: d0.streams)
        await eventually(lambda: router.cluster._clients[d0.address].status is not None)
        assert usable(router) == [d1.address]
        d0.moves = True
        await eventually(lambda: len(usable(router)) == 2)


async def test_a_node_whose_heartbeats_say_that_its_engine_is_late_is_silent_and_dead(model):
    """The frontend and the transfer thread live, and the engine thread stands still."""
    async with two_nodes(model, suspect_after_s=2.0, dead_after_s=5.0) as (client, router, d0, d1):
        call = ask(client, max_tokens=9)
        number = (await d0.submitted()).number
        d0.say({number: [20]})
        await call.read()
        for d0.late_s in (1.0, 3.0):
            those = [d0.address, d1.address] if d0.late_s < 2.0 else [d1.address]
            await eventually(lambda those=those: usable(router) == those)
        d0.late_s = 6.0
        again = await d1.complete([22])
        assert list(again.token_ids) == [*PROMPT, 20]
        assert (await collect(call))[1] == [22]


@pytest.mark.parametrize("late_s", [math.nan, -5.0])
async def test_a_heartbeat_that_says_nonsense_is_one_of_an_engine_in_time(late_s):
    pulse = EngineLiveness(LivenessLimits(silent_s=60.0, dead_s=60.0), lambda: None)
    pulse.heartbeat(late_s)
    assert pulse.moves and pulse._standstill.look() >= 0.0


async def test_a_silent_node_without_requests_keeps_its_stream(model):
    async with two_nodes(model, suspect_after_s=0.4, dead_after_s=0.5) as (_, router, d0, _d1):
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


async def _is_silent(router: RunningRouter, node: StubDecodeNode) -> None:
    node.moves = False
    await eventually(lambda: not router.cluster.ready)


async def _says_that_it_is_silent(router: RunningRouter, node: StubDecodeNode) -> None:
    """Earlier than a router finds out."""
    node.description.state = "unhealthy"
    await eventually(lambda: not router.cluster.ready)


@pytest.mark.parametrize("falls_silent", [_is_silent, _says_that_it_is_silent])
async def test_requests_wait_for_the_last_node_while_it_may_wake(model, monkeypatch, falls_silent):
    """Seen failing where a silent node is as good as gone: they ended with UNAVAILABLE."""
    monkeypatch.setattr(cluster, "GRACE_S", 0.0)
    async with served(model, **KNOBS) as (client, node, router):
        await falls_silent(router, node)
        answer = asyncio.create_task(collect(ask(client)))
        await eventually(lambda: answer.done() or router.admission.num_live)
        node.moves, node.description.state = True, "ready"
        submit = await submitted_or_over(node, answer)
        assert submit is not None, answer.exception()
        node.finish(submit.number, [20])
        assert (await answer)[1] == [20]


async def test_nobody_waits_for_a_node_whose_engine_counts_as_dead(model, monkeypatch):
    monkeypatch.setattr(cluster, "GRACE_S", 0.0)
    async with StubDecodeNode() as node:
        knobs = {"suspect_after_s": 0.5, "dead_after_s": 1.0}
        async with router_for(model, decode=[node.address], **knobs) as (client, router):
            await client.wait_until_serving()
            node.moves = False
            await eventually(lambda: not router.cluster.ready)
            for _ in range(2):  # of which the first may have come before
                assert (await failure(ask(client))).details() == cluster.NOT_READY


async def test_a_node_that_has_never_beaten_gets_nothing(model):
    """Seen failing with a pulse that moves from the start."""
    async with StubDecodeNode() as node:
        node.moves = False
        async with router_for(model, decode=[node.address]) as (_, router):
            await eventually(lambda: node.num_described)
            await eventually(lambda: router.cluster._clients[node.address].status is not None)
            assert usable(router) == []
            node.moves = True
            await eventually(lambda: usable(router) == [node.address])


def test_time_in_which_the_router_itself_stood_still_is_no_silence_of_others():
    """Seen failing with the time between two looks counted in full."""
    now = 0.0
    standstill = StallMonitor(0.5, now=lambda: now)
    now = 600.0
    assert standstill.look() == 1.0
    now = 600.5
    assert standstill.look() == 1.5
    standstill.moved()
    now = 601.0
    assert standstill.look() == 0.5


async def test_a_change_is_told_once():
    reported = []
    pulse = EngineLiveness(
        LivenessLimits(0.01, 0.02), lambda: reported.append((pulse.moves, pulse.dead))
    )
    assert not pulse.moves
    for _ in range(3):
        pulse.heartbeat()
    await asyncio.wait_for(pulse.until_dead(), 60)
    await asyncio.wait_for(pulse.until_dead(), 60)
    pulse.heartbeat()
    moves, silent, dead = (True, False), (False, False), (False, True)
    assert reported == [moves, silent, dead, moves]


def test_a_node_is_not_dead_before_it_is_silent():
    with pytest.raises(ValidationError, match="must be at least --suspect-after-s"):
        RouterConfig(model="m", suspect_after_s=5.0, dead_after_s=4.0)


async def test_an_engine_that_beats_is_alive_for_longer_than_any_limit():
    """Seen failing where a beat leaves the silence before it standing."""
    pulse = EngineLiveness(LivenessLimits(silent_s=0.4, dead_s=0.8), lambda: None)
    watching = asyncio.create_task(pulse.until_dead())
    for _ in range(100):  # each beat after about one look
        pulse.heartbeat()
        await asyncio.sleep(0.02)
        assert pulse.moves and not pulse.dead
    await watching
    assert pulse.dead and not pulse.moves
