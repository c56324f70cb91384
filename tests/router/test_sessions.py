"""Requests of one session find one another, whichever way they name it."""

import asyncio
from typing import Any

import openai
import pytest
from grpc import StatusCode

from api.requests.validation import MAX_SESSION_ID_CHARACTERS
from tests.api.rig import COMPLETIONS, api_for, collect, eventually, fails, router_for, served
from tests.support.http_client import connected
from tests.support.stub_decode_node import StubDecodeNode


@pytest.mark.parametrize(
    "way", ["session_id", "user", "prompt_cache_key", "X-Session-Id", "X-SMG-Routing-Key"]
)
async def test_a_session_stays_with_its_decode_node(model, way):
    async with StubDecodeNode() as d0, StubDecodeNode() as d1:
        nodes = [d0, d1]
        async with router_for(
            model, decode=[d0.address, d1.address], policy="session_affinity"
        ) as (client, router):
            await eventually(lambda: len(router.cluster.usable()) == 2)
            url = f"http://127.0.0.1:{router.http_port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as http:

                async def ask(session: str) -> None:
                    if way == "session_id":
                        await collect(client.generate("x", session_id=session))
                        return
                    named: dict[str, Any] = {
                        "user": {"user": session},
                        "prompt_cache_key": {
                            "user": "shared",
                            "extra_body": {"prompt_cache_key": session},
                        },
                    }.get(
                        way,
                        {
                            "extra_headers": {way: session},
                            "extra_body": {"prompt_cache_key": "shared"},
                        },
                    )
                    await http.completions.create(model=str(model), prompt="x", **named)  # type: ignore[call-overload]

                homes: dict[str, set[str]] = {}
                keys: dict[str, set[int]] = {}
                for session in ["a", "b", "c", "d", "a", "d", "b", "c", "c", "a"]:
                    asking = asyncio.create_task(ask(session))
                    arrivals = [asyncio.create_task(node.submitted()) for node in nodes]
                    done, waiting = await asyncio.wait(arrivals, return_when="FIRST_COMPLETED")
                    for task in waiting:
                        task.cancel()
                    node = nodes[arrivals.index(done.pop())]
                    submit = await arrivals[nodes.index(node)]
                    node.finish(submit.number)
                    await asking
                    homes.setdefault(session, set()).add(node.address)
                    keys.setdefault(session, set()).add(submit.routing_key)
                assert all(len(home) == 1 for home in homes.values())
                assert len(set.union(*homes.values())) == 2
                assert all(len(key) == 1 for key in keys.values())
                assert len(set.union(*keys.values()) - {0}) == 4


async def test_the_name_of_a_session_has_a_length_that_can_be_remembered(model):
    name = "x" * (MAX_SESSION_ID_CHARACTERS + 1)
    async with api_for(model) as api:
        answer = await api.post(COMPLETIONS, prompt="x", user=name)
        assert answer.status == 400
        assert str(MAX_SESSION_ID_CHARACTERS) in answer.error["message"]
        async with connected(api.router.http_port) as wire:
            await wire.post(COMPLETIONS, {"prompt": "x"}, x_session_id=name)
            assert (await wire.response()).status == 400
    async with served(model) as (client, _, _):
        await fails(client.generate("x", session_id=name), StatusCode.INVALID_ARGUMENT)
