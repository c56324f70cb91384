"""Requests of one session use the same node, whichever way they name it."""

import asyncio

import pytest
from grpc import StatusCode

from api.requests.validation import MAX_SESSION_ID_CHARACTERS
from tests.api.rig import (
    COMPLETIONS,
    api_for,
    collect,
    fails,
    served,
    submitted_to_one_of,
    two_nodes,
)
from tests.support.network.http_client import post


def _named(way: str, session: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the fields and headers of a request that names its session in this way. Weaker ways
    have the same name for all sessions."""
    match way:
        case "user":
            return {"user": session}, {}
        case "prompt_cache_key":
            return {"user": "shared", "prompt_cache_key": session}, {}
        case _:
            return {"prompt_cache_key": "shared"}, {way: session}


@pytest.mark.parametrize(
    "way", ["session_id", "user", "prompt_cache_key", "X-Session-Id", "X-SMG-Routing-Key"]
)
async def test_a_session_keeps_its_decode_node(model, way):
    homes: dict[str, set[str]] = {}
    keys: dict[str, set[int]] = {}
    async with two_nodes(model, policy="session_affinity") as (client, router, *nodes):

        async def ask(session: str) -> None:
            if way == "session_id":
                await collect(client.generate("x", session_id=session))
                return
            fields, headers = _named(way, session)
            answer = await post(router.http_port, COMPLETIONS, {"prompt": "x", **fields}, **headers)
            assert answer.status == 200

        for session in ["a", "b", "c", "d", "a", "d", "b", "c", "c", "a"]:
            asking = asyncio.create_task(ask(session))
            node, submit = await submitted_to_one_of(nodes)
            node.finish(submit.number)
            await asking
            homes.setdefault(session, set()).add(node.address)
            keys.setdefault(session, set()).add(submit.routing_key)
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 2
    assert all(len(key) == 1 for key in keys.values())
    assert len(set.union(*keys.values()) - {0}) == 4


async def test_the_name_of_a_session_has_a_length_limit(model):
    name = "x" * (MAX_SESSION_ID_CHARACTERS + 1)
    async with api_for(model) as api:
        answer = await api.post(COMPLETIONS, prompt="x", user=name)
        assert answer.status == 400
        assert str(MAX_SESSION_ID_CHARACTERS) in answer.error["message"]
        port = api.router.http_port
        assert (await post(port, COMPLETIONS, {"prompt": "x"}, x_session_id=name)).status == 400
    async with served(model) as (client, _, _):
        await fails(client.generate("x", session_id=name), StatusCode.INVALID_ARGUMENT)
