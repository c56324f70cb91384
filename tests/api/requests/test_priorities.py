"""Priorities of requests: allowed values, and the values that nodes receive."""

import asyncio

import pytest
from grpc import StatusCode

from api.auth.client import Client
from api.generation import PriorityLimits
from common.config import ClientsConfig
from common.errors import InvalidRequest
from tests.api.auth.rig import bearer, entry, write
from tests.api.rig import collect, fails, router_for, served
from tests.support.network.http_client import post
from tests.support.processes.stub_decode_node import StubDecodeNode, Submission


def _client(priority: int | None) -> Client:
    return Client("one", priority=priority)


@pytest.mark.parametrize(
    "highest, of_key, asked, given",
    [
        (0, None, None, 0),
        (0, None, -7, -7),
        (0, None, -100, -100),
        (5, None, None, 5),
        (5, None, 0, 0),
        (5, None, 3, 3),
        (0, 50, None, 50),
        (0, 50, 20, 20),
        (5, -10, None, -10),
        (5, -10, 0, -10),
        (5, -10, -20, -20),
    ],
)
def test_a_request_has_the_requested_priority_up_to_its_clients_limit(
    highest, of_key, asked, given
):
    assert PriorityLimits(highest).decide(asked, _client(of_key)) == given
    turned = PriorityLimits(highest, low_values_first=True)
    assert turned.decide(-asked if asked else asked, _client(of_key)) == given


@pytest.mark.parametrize(
    "highest, of_key, asked", [(0, None, 1), (0, None, -101), (5, None, 6), (5, -10, -9)]
)
def test_a_priority_over_the_limit_is_rejected(highest, of_key, asked):
    ends = highest if of_key is None else of_key
    with pytest.raises(InvalidRequest, match=rf"priority must be in \[-100, {ends}\], got {asked}"):
        PriorityLimits(highest).decide(asked, _client(of_key))
    turned = PriorityLimits(highest, low_values_first=True)
    with pytest.raises(InvalidRequest, match=rf"in \[{-ends}, 100\], got {-asked}"):
        turned.decide(-asked, _client(of_key))


async def _submitted(node: StubDecodeNode) -> Submission:
    submit = await node.complete()
    return submit


async def test_over_grpc_a_client_may_only_lower_its_priority(client, node):
    for fields, priority in (({}, 0), ({"priority": -3}, -3)):
        call = client.generate("x", **fields)
        assert (await _submitted(node)).priority == priority
        await collect(call)
    await fails(
        client.generate("x", priority=1),
        StatusCode.INVALID_ARGUMENT,
        "priority must be in [-100, 0], got 1",
    )


_BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/generate": {"text": "x"},
}


@pytest.mark.parametrize("path", _BODIES)
async def test_every_http_api_has_the_priority(model, path):
    clients = ClientsConfig(priority=9, low_priority_values_first=True)
    async with served(model, clients=clients) as (_, node, router):
        for asked, priority in ((None, 9), (-9, 9), (4, -4)):
            body = {**_BODIES[path], "priority": asked}
            answer = asyncio.create_task(post(router.http_port, path, body))
            assert (await _submitted(node)).priority == priority
            assert (await answer).status == 200
        answer = await post(router.http_port, path, {**_BODIES[path], "priority": -10})
        assert answer.status == 400
        assert "priority must be in [-9, 100], got -10" in answer.body.decode()


async def test_nodes_know_clients_by_a_number_and_their_weight(model, tmp_path):
    """Two choices of one client have the same number, and every router computes the same from a
    name."""
    file = write(tmp_path / "keys", entry("alice", weight=2.0), entry("bob"))
    clients = ClientsConfig(api_keys=file)
    body = {"prompt": "x", "n": 2}
    known: dict[str, set[tuple[int, float]]] = {}
    async with StubDecodeNode() as node:
        for name in ("alice", "bob", "alice"):
            async with router_for(model, decode=[node.address], clients=clients) as (rpc, router):
                await rpc.wait_until_serving()
                answer = asyncio.create_task(
                    post(router.http_port, "/v1/completions", body, authorization=bearer(name))
                )
                for submit in [await _submitted(node), await _submitted(node)]:
                    known.setdefault(name, set()).add((submit.client, submit.client_weight))
                assert (await answer).status == 200
    ((alice, twice),), ((bob, once),) = known["alice"], known["bob"]
    assert 0 not in (alice, bob) and alice != bob
    assert (twice, once) == (2.0, 1.0)


async def test_a_key_may_have_another_priority(model, tmp_path):
    file = write(tmp_path / "keys", entry("alice", priority=5), entry("bob", priority=-5))
    clients = ClientsConfig(api_keys=file)
    async with served(model, clients=clients) as (_, node, router):
        for name, priority in (("alice", 5), ("bob", -5)):
            asked = post(
                router.http_port, "/v1/completions", {"prompt": "x"}, authorization=bearer(name)
            )
            answer = asyncio.create_task(asked)
            assert (await _submitted(node)).priority == priority
            assert (await answer).status == 200
