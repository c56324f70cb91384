"""Placed requests count as load for later placements, as long as they are placed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protos.decode_pb2 import FINISH_REASON_ERROR
from protos.router_pb2 import TokenIds
from tests.api.rig import Client, collect, eventually, failure, served
from tests.support.processes.stub_decode_node import StubDecodeNode, StubNode, Submission


class Rig:
    """One decode node that reads from two prefill nodes."""

    def __init__(self, client: Client, decode: StubDecodeNode) -> None:
        self._client = client
        self.decode = decode

    async def place(self, num_tokens: int) -> tuple[Any, Submission]:
        call = self._client.generate(token_ids=TokenIds(ids=[7] * num_tokens))
        return call, await self.decode.submitted()


@asynccontextmanager
async def rig_of(model: Path, *prefill: StubNode, policy: str) -> AsyncIterator[Rig]:
    addresses = [node.address for node in prefill]
    decode = StubDecodeNode(paired=addresses, serves_alone=False)
    async with served(model, decode, prefill=addresses, policy=policy) as (client, _, router):
        await eventually(lambda: any(len(each.prefill) == 2 for each in router.cluster.usable()))
        yield Rig(client, decode)


@asynccontextmanager
async def placed_long(model: Path) -> AsyncIterator[tuple[Rig, Any, Submission]]:
    """Place a long prompt at the first prefill node, which short ones then avoid."""
    async with StubNode() as p0, StubNode() as p1:
        async with rig_of(model, p0, p1, policy="least_tokens") as rig:
            call, submit = await rig.place(40)
            for _ in range(3):
                _, short = await rig.place(1)
                assert short.prefill_addresses[0] != submit.prefill_addresses[0]
            yield rig, call, submit


@pytest.mark.parametrize("end", ["first token", "cancelled", "failed", "finished"])
async def test_a_prompt_counts_until_its_first_token_or_its_end(model, end):
    async with placed_long(model) as (rig, call, long):
        match end:
            case "first token":
                rig.decode.say({long.number: [20]})
                await call.read()
            case "cancelled":
                call.cancel()
                assert await rig.decode.cancelled() == long.number
            case "failed":
                ended = {long.number: FINISH_REASON_ERROR}
                rig.decode.say(ended=ended, error="broken", error_code=13)
                await failure(call)
            case "finished":
                rig.decode.finish(long.number, [20])
                await collect(call)
        _, short = await rig.place(1)
        assert short.prefill_addresses[0] == long.prefill_addresses[0]


async def test_a_reported_queue_counts_for_policies_that_use_it(model):
    """The queue has requests of other routers. This router has placed none yet."""
    async with StubNode() as p0, StubNode() as p1:
        p0.description.prompts.queued_s = 5.0
        async with rig_of(model, p0, p1, policy="shortest_queue") as rig:
            for _ in range(4):
                _, submit = await rig.place(1)
                assert list(submit.prefill_addresses) == [p1.address, p0.address]
