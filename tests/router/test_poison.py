"""Requests on nodes whose engine dies: which of them go on, how, and which one does not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from grpc import StatusCode

from common.request import CRASHED_TWICE, QUARANTINE_TOKENS
from protos.decode_pb2 import FINISH_REASON_ERROR
from router.generation import MAX_ENGINE_CRASHES, MAX_REPLAYS
from tests.api.rig import Client, ask, collect, eventually, fails, failure, router_for
from tests.support.stub_decode_node import StubDecodeNode, Submission


@asynccontextmanager
async def nodes(model: Path, count: int) -> AsyncIterator[tuple[Client, list[StubDecodeNode]]]:
    async with AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(StubDecodeNode()) for _ in range(count)]
        router = router_for(model, decode=[stub.address for stub in stubs])
        client, running = await stack.enter_async_context(router)
        await eventually(lambda: len(running.cluster.usable()) == count)
        yield client, stubs


async def submitted(stubs: Sequence[StubDecodeNode]) -> tuple[StubDecodeNode, Submission]:
    """Return the node that receives the next request, and the submission."""
    tasks = {asyncio.create_task(stub.submitted()): stub for stub in stubs}
    done, _ = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    (task,) = done
    return tasks[task], task.result()


async def lose_engine(node: StubDecodeNode) -> None:
    node.lose_engine()
    await eventually(lambda: not node.streams)


async def _ends_well(call: Any, node: StubDecodeNode, submit: Submission) -> None:
    node.finish(submit.number, [30])
    assert (await collect(call))[2].finish_reason == "stop"


async def test_who_was_there_when_an_engine_died_says_so_at_its_next_node(model):
    async with nodes(model, 2) as (client, stubs):
        call = ask(client)
        node, submit = await submitted(stubs)
        assert submit.engine_crashes == 0
        await lose_engine(node)
        node, submit = await submitted(stubs)
        assert submit.engine_crashes == 1
        await _ends_well(call, node, submit)


async def test_who_is_alone_in_a_second_engine_that_dies_ends_there(model):
    async with nodes(model, 3) as (client, stubs):
        call = ask(client)
        for _ in range(2):
            node, submit = await submitted(stubs)
            if submit.engine_crashes:
                node.try_alone(submit.number)
            await lose_engine(node)
        error = await failure(call)
        assert (error.code(), error.details()) == (StatusCode.INTERNAL, CRASHED_TWICE)
        assert sum(bool(message.submits) for stub in stubs for message in stub.received) == 2


async def test_who_waits_while_another_computes_alone_is_not_charged(model):
    """However often that is: it has computed nothing."""
    async with nodes(model, 3) as (client, stubs):
        call = ask(client)
        for _ in range(MAX_REPLAYS + 2):
            node, submit = await submitted(stubs)
            assert submit.engine_crashes == 0
            node.try_alone(None)
            await lose_engine(node)
        await _ends_well(call, *await submitted(stubs))


async def test_a_suspect_that_waits_for_its_turn_is_charged_no_second_death(model):
    async with nodes(model, 3) as (client, stubs):
        call = ask(client)
        for _ in range(MAX_ENGINE_CRASHES + 2):  # but for the first of what the others computed
            await lose_engine((await submitted(stubs))[0])
        node, submit = await submitted(stubs)
        assert submit.engine_crashes == 1
        await _ends_well(call, node, submit)


async def test_who_gets_past_the_place_of_a_death_is_innocent_of_it(model):
    async with nodes(model, 3) as (client, stubs):
        call = ask(client)
        await lose_engine((await submitted(stubs))[0])
        node, submit = await submitted(stubs)
        node.say({submit.number: [20] * QUARANTINE_TOKENS})
        await call.read()
        await node.die()
        node, submit = await submitted(stubs)
        assert (submit.engine_crashes, submit.num_generated) == (0, QUARANTINE_TOKENS)
        await _ends_well(call, node, submit)


async def test_who_always_gets_on_and_is_always_there_when_engines_die_ends_too(model):
    async with nodes(model, 3) as (client, stubs):
        call = ask(client, max_tokens=50)
        for _ in range(MAX_ENGINE_CRASHES + 1):
            node, submit = await submitted(stubs)
            node.say({submit.number: [20] * QUARANTINE_TOKENS})
            await lose_engine(node)
        await fails(call, StatusCode.UNAVAILABLE, "has disconnected")


async def test_nodes_that_are_asked_to_end_cost_a_request_nothing(model):
    """More of them than a request may lose otherwise. That those which have begun it lose nothing
    either is shown with real nodes, as they move it (tests/integration/test_membership.py)."""
    async with nodes(model, MAX_REPLAYS + 3) as (client, stubs):
        call = ask(client, max_tokens=50)
        for _ in range(MAX_REPLAYS + 2):
            node, submit = await submitted(stubs)
            node.change_status(state="draining")
            node.finish(
                submit.number,
                reason=FINISH_REASON_ERROR,
                error="this node is draining",
                error_code=StatusCode.UNAVAILABLE.value[0],
            )
        await _ends_well(call, *await submitted(stubs))


async def test_what_cannot_be_computed_is_internal_and_nobody_is_asked_again(model):
    async with nodes(model, 2) as (client, stubs):
        call = ask(client)
        node, submit = await submitted(stubs)
        node.finish(
            submit.number,
            reason=FINISH_REASON_ERROR,
            error="the model's logits were not finite",
            error_code=StatusCode.INTERNAL.value[0],
        )
        error = await failure(call)
        reported = (error.code(), error.details())
        assert reported == (StatusCode.INTERNAL, "the model's logits were not finite")
        assert sum(bool(message.submits) for stub in stubs for message in stub.received) == 1
