"""Load shedding: the router rejects requests that no node can start in time, at once and with a
retry time."""

import math
import time
from typing import Any

import pytest
from grpc import StatusCode

from api.program.assembly import RunningRouter
from common.errors import QueueFull
from protos.decode_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP
from protos.router_pb2 import Backlog
from router.policy.load import RequestDue
from tests.api.rig import collect, eventually, fails, failure, metric, served
from tests.support.network.http_client import post
from tests.support.processes.stub_decode_node import StubDecodeNode, StubNode

RESOURCE_EXHAUSTED = StatusCode.RESOURCE_EXHAUSTED.value[0]


def late(queued_s: float, token_s: float = 0.001) -> StubDecodeNode:
    """A node with a queue of this length and this duration of a prompt token."""
    node = StubDecodeNode()
    node.status.prompts.CopyFrom(Backlog(queued_s=queued_s, token_s=token_s))
    return node


def _retry_after(error: Any) -> str:
    return str(dict(error.trailing_metadata())["retry-after"])


async def test_a_request_that_cannot_start_in_time_reaches_no_node(model):
    async with served(model, late(10.0), max_queue_fraction=0.25) as (client, node, _):
        call = client.generate("x", timeout_s=60.0)
        submit = await node.submitted()
        # Twice the share: a node may accept longer waits than the router. Seen failing with the
        # whole budget.
        assert 15.0 < submit.queue_s <= 30.0
        node.finish(submit.number)
        await collect(call)
        error = await fails(client.generate("x", timeout_s=10.0), StatusCode.RESOURCE_EXHAUSTED)
        assert 1 <= int(_retry_after(error)) <= 15
        assert sum(len(message.submits) for message in node.received) == 1


async def test_over_http_the_rejection_is_429_with_a_retry_time(model):
    knobs = {"max_queue_fraction": 0.1, "request_timeout_s": 300.0}
    async with served(model, late(100.0), **knobs) as (_, _, router):
        body = {"model": str(model), "prompt": "x"}
        answer = await post(router.http_port, "/v1/completions", body)
        assert answer.status == 429
        assert 60 <= int(answer.headers["retry-after"]) <= 70
        assert answer.error["type"] == "rate_limit_error"


async def test_requests_are_accepted_again_when_the_queue_is_empty(model):
    async with served(model, late(600.0)) as (client, node, router):
        await failure(client.generate("x"))
        node.change_status(prompts=Backlog(queued_s=0.0, token_s=0.001))
        await eventually(lambda: _takes(router))
        call = client.generate("x")
        await node.complete()
        await collect(call)


def _takes(router: RunningRouter) -> bool:
    now = time.monotonic()
    try:
        router.cluster.check_in_time(RequestDue(now + 1.0, now + 10.0))
    except QueueFull:
        return False
    return True


async def test_requests_placed_by_this_router_count_at_once(model):
    async with served(model, late(0.0, 10.0)) as (client, node, _):
        first = client.generate("x", timeout_s=60.0)
        submit = await node.submitted()
        await fails(client.generate("x", timeout_s=60.0), StatusCode.RESOURCE_EXHAUSTED)
        node.say({submit.number: [20]})
        await first.read()  # its prompt is computed, so nothing is queued any more
        second = client.generate("x", timeout_s=60.0)
        other = await node.submitted()
        node.say(ended={submit.number: FINISH_REASON_STOP, other.number: FINISH_REASON_STOP})
        await collect(first)
        await collect(second)


async def test_a_prefill_node_reports_its_queue_on_request(model):
    async with StubNode() as prefill:
        prefill.description.prompts.CopyFrom(Backlog(queued_s=600.0, token_s=0.001))
        addresses = [prefill.address]
        node = StubDecodeNode(paired=addresses, serves_alone=False)
        async with served(model, node, prefill=addresses) as (client, node, _):
            await fails(client.generate("x"), StatusCode.RESOURCE_EXHAUSTED)
            prefill.description.prompts.queued_s = 0.0
            before = prefill.num_described
            await eventually(lambda: prefill.num_described > before + 1)
            call = client.generate("x")
            await node.complete()
            await collect(call)


@pytest.mark.parametrize(
    "told_s, retry_after", [(6.5, "7"), (math.nan, "1"), (math.inf, "1"), (-5.0, "1"), (1e12, "1")]
)
async def test_a_nodes_own_rejection_has_a_retry_time_if_possible(model, told_s, retry_after):
    async with served(model) as (client, node, _):
        call = client.generate("x")
        await node.complete(
            reason=FINISH_REASON_ERROR,
            error="overloaded: too much",
            error_code=RESOURCE_EXHAUSTED,
            retry_after_s=told_s,
        )
        error = await fails(call, StatusCode.RESOURCE_EXHAUSTED)
        assert _retry_after(error) == retry_after


async def test_shed_requests_are_counted(model):
    async with served(model, late(600.0)) as (client, _, router):
        await failure(client.generate("x"))
        assert metric(router, "baton_requests_rejected_total", reason="late") == 1
