"""Requests on nodes whose engine crashes: which of them continue, how, and which one does not."""

from typing import Any

from grpc import StatusCode

from common.request import CRASHED_TWICE, QUARANTINE_TOKENS
from protos.decode_pb2 import FINISH_REASON_ERROR
from router.generation import MAX_ENGINE_CRASHES, MAX_REPLAYS
from tests.api.rig import (
    ask,
    collect,
    decode_nodes,
    eventually,
    fails,
    failure,
    submitted_to_one_of,
)
from tests.support.processes.stub_decode_node import StubDecodeNode, Submission


async def lose_engine(node: StubDecodeNode) -> None:
    node.lose_engine()
    await eventually(lambda: not node.streams)


async def _ends_well(call: Any, node: StubDecodeNode, submit: Submission) -> None:
    node.finish(submit.number, [30])
    assert (await collect(call))[2].finish_reason == "stop"


async def test_a_request_reports_the_crash_of_its_engine_to_its_next_node(model):
    async with decode_nodes(model, 2) as (client, _, stubs):
        call = ask(client)
        node, submit = await submitted_to_one_of(stubs)
        assert submit.engine_crashes == 0
        await lose_engine(node)
        node, submit = await submitted_to_one_of(stubs)
        assert submit.engine_crashes == 1
        await _ends_well(call, node, submit)


async def test_a_request_alone_in_a_second_engine_crash_ends(model):
    async with decode_nodes(model, 3) as (client, _, stubs):
        call = ask(client)
        for _ in range(2):
            node, submit = await submitted_to_one_of(stubs)
            if submit.engine_crashes:
                node.try_alone(submit.number)
            await lose_engine(node)
        error = await failure(call)
        assert (error.code(), error.details()) == (StatusCode.INTERNAL, CRASHED_TWICE)
        assert sum(bool(message.submits) for stub in stubs for message in stub.received) == 2


async def test_a_request_that_waits_while_another_computes_alone_is_not_charged(model):
    """For any number of crashes, because it has computed nothing."""
    async with decode_nodes(model, 3) as (client, _, stubs):
        call = ask(client)
        for _ in range(MAX_REPLAYS + 2):
            node, submit = await submitted_to_one_of(stubs)
            assert submit.engine_crashes == 0
            node.try_alone(None)
            await lose_engine(node)
        await _ends_well(call, *await submitted_to_one_of(stubs))


async def test_a_quarantined_request_that_waits_for_its_turn_is_charged_no_second_crash(model):
    async with decode_nodes(model, 3) as (client, _, stubs):
        call = ask(client)
        for _ in range(MAX_ENGINE_CRASHES + 2):  # except for the first token of each other request
            await lose_engine((await submitted_to_one_of(stubs))[0])
        node, submit = await submitted_to_one_of(stubs)
        assert submit.engine_crashes == 1
        await _ends_well(call, node, submit)


async def test_a_request_that_passes_the_token_of_the_crash_is_cleared(model):
    async with decode_nodes(model, 3) as (client, _, stubs):
        call = ask(client)
        await lose_engine((await submitted_to_one_of(stubs))[0])
        node, submit = await submitted_to_one_of(stubs)
        node.say({submit.number: [20] * QUARANTINE_TOKENS})
        await call.read()
        await node.die()
        node, submit = await submitted_to_one_of(stubs)
        assert (submit.engine_crashes, submit.num_generated) == (0, QUARANTINE_TOKENS)
        await _ends_well(call, node, submit)


async def test_a_request_that_progresses_but_is_present_in_every_crash_ends(model):
    async with decode_nodes(model, 3) as (client, _, stubs):
        call = ask(client, max_tokens=50)
        for _ in range(MAX_ENGINE_CRASHES + 1):
            node, submit = await submitted_to_one_of(stubs)
            node.say({submit.number: [20] * QUARANTINE_TOKENS})
            await lose_engine(node)
        await fails(call, StatusCode.UNAVAILABLE, "has disconnected")


async def test_nodes_that_are_shut_down_charge_no_request(model):
    """There are more shutdowns than a request may have lost nodes. Responses that have begun
    migrate before a shutdown, which is tested with real nodes
    (tests/integration/operations/test_membership.py)."""
    async with decode_nodes(model, MAX_REPLAYS + 3) as (client, _, stubs):
        call = ask(client, max_tokens=50)
        for _ in range(MAX_REPLAYS + 2):
            node, submit = await submitted_to_one_of(stubs)
            node.change_status(state="draining")
            node.finish(
                submit.number,
                reason=FINISH_REASON_ERROR,
                error="the node is draining",
                error_code=StatusCode.UNAVAILABLE.value[0],
            )
        await _ends_well(call, *await submitted_to_one_of(stubs))


async def test_a_request_that_cannot_be_computed_is_internal_and_not_retried(model):
    async with decode_nodes(model, 2) as (client, _, stubs):
        call = ask(client)
        node, submit = await submitted_to_one_of(stubs)
        node.finish(
            submit.number,
            reason=FINISH_REASON_ERROR,
            error="the model's logits contain NaN or Inf",
            error_code=StatusCode.INTERNAL.value[0],
        )
        error = await failure(call)
        reported = (error.code(), error.details())
        assert reported == (StatusCode.INTERNAL, "the model's logits contain NaN or Inf")
        assert sum(bool(message.submits) for stub in stubs for message in stub.received) == 1
