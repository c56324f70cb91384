"""Profiles as operators ask for them: of all nodes, each with its own file."""

import pytest

from tests.api.openai.openai_rig import api_for
from tests.api.rig import router_for
from tests.support.http_client import post
from tests.support.stub_decode_node import StubDecodeNode, StubNode

START, STOP = "/start_profile", "/stop_profile"


async def test_all_nodes_are_profiled_and_say_where_their_traces_are(model):
    async with StubNode() as prefill, StubDecodeNode(paired=[prefill.address]) as decode:
        where = {"decode": [decode.address], "prefill": [prefill.address]}
        async with router_for(model, **where) as (client, router):
            await client.wait_until_serving()
            nothing = await post(router.http_port, STOP, {})
            assert nothing.status == 409
            assert "no profile is running" in nothing.error["message"]
            begun = await post(router.http_port, START, {"num_steps": 7})
            assert (begun.status, begun.json["status"]) == (200, "profiling")
            assert (prefill.profiled, decode.profiled) == (7, 7)
            ended = await post(router.http_port, STOP, {})
            told = {each["role"]: each for each in ended.json["profiles"]}
            assert told == {
                node.description.role: {
                    "role": node.description.role,
                    "address": node.address,
                    "path": f"/traces/{node.description.role}",
                }
                for node in (prefill, decode)
            }


@pytest.mark.parametrize(
    "asked, param",
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 1001}, "num_steps"),
        ({"output_dir": "/tmp"}, "output_dir"),
        ({"with_stack": True}, "with_stack"),
    ],
)
async def test_what_is_no_profile_reaches_no_node(model, asked, param):
    async with api_for(model) as api:
        answer = await api.post(START, **asked)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert api.node.profiled is None
