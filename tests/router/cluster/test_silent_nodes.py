"""Decode nodes whose frontends answer while their engines make no progress: they send no
heartbeats."""

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
from tests.support.processes.stub_decode_node import StubDecodeNode

KNOBS = {"suspect_after_s": 1.0, "dead_after_s": 1000.0}  # the stubs send five heartbeats a second


async def test_a_node_without_heartbeats_gets_no_requests_until_they_resume(model):
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
        # Its requests wait, and no other node repeats them.
        d0.finish(number, [20])
        assert (await collect(live))[1] == [20]


async def test_requests_of_a_node_without_heartbeats_for_long_continue_on_another(model):
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
        # The router connects to it again, and still sends no requests.
        await eventually(lambda: d0.streams)
        await eventually(lambda: router.cluster._clients[d0.address].status is not None)
        assert usable(router) == [d1.address]
        d0.moves = True
        await eventually(lambda: len(usable(router)) == 2)


async def test_a_node_whose_heartbeats_report_a_late_engine_is_silent_and_then_dead(model):
    """The frontend and the transfer thread run, and the engine thread makes no progress."""
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
async def test_an_invalid_heartbeat_counts_as_one_of_an_engine_in_time(late_s):
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
    """The node reports it earlier than a router detects it."""
    node.description.state = "unhealthy"
    await eventually(lambda: not router.cluster.ready)


@pytest.mark.parametrize("falls_silent", [_is_silent, _says_that_it_is_silent])
async def test_requests_wait_for_the_last_node_while_it_may_recover(
    model, monkeypatch, falls_silent
):
    """Seen failing if a silent node counts as lost: they ended with UNAVAILABLE."""
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


async def test_no_request_waits_for_a_node_whose_engine_counts_as_dead(model, monkeypatch):
    monkeypatch.setattr(cluster, "GRACE_S", 0.0)
    async with StubDecodeNode() as node:
        knobs = {"suspect_after_s": 0.5, "dead_after_s": 1.0}
        async with router_for(model, decode=[node.address], **knobs) as (client, router):
            await client.wait_until_serving()
            node.moves = False
            await eventually(lambda: not router.cluster.ready)
            for _ in range(2):  # the first of which may have arrived before
                assert (await failure(ask(client))).details() == cluster.NOT_READY


async def test_a_node_that_has_never_sent_a_heartbeat_gets_no_requests(model):
    """Seen failing if heartbeats count as present at the start."""
    async with StubDecodeNode() as node:
        node.moves = False
        async with router_for(model, decode=[node.address]) as (_, router):
            await eventually(lambda: node.num_described)
            await eventually(lambda: router.cluster._clients[node.address].status is not None)
            assert usable(router) == []
            node.moves = True
            await eventually(lambda: usable(router) == [node.address])


def test_a_stall_of_the_router_itself_does_not_count_as_silence_of_nodes():
    """Seen failing if the time between two checks counts in full."""
    now = 0.0
    standstill = StallMonitor(0.5, now=lambda: now)
    now = 600.0
    assert standstill.look() == 1.0
    now = 600.5
    assert standstill.look() == 1.5
    standstill.moved()
    now = 601.0
    assert standstill.look() == 0.5


async def test_a_change_is_reported_once():
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


def test_a_node_is_silent_before_it_is_dead():
    with pytest.raises(ValidationError, match="must be at least --suspect-after-s"):
        RouterConfig(model="m", suspect_after_s=5.0, dead_after_s=4.0)


async def test_an_engine_with_heartbeats_is_alive_for_longer_than_any_limit():
    """Seen failing if a heartbeat does not reset the silence before it."""
    pulse = EngineLiveness(LivenessLimits(silent_s=0.4, dead_s=0.8), lambda: None)
    watching = asyncio.create_task(pulse.until_dead())
    for _ in range(100):  # a heartbeat after about one check
        pulse.heartbeat()
        await asyncio.sleep(0.02)
        assert pulse.moves and not pulse.dead
    await watching
    assert pulse.dead and not pulse.moves
