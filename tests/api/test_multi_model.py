"""Several models behind one router, each with its own stub node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from api.program.assembly import run_router
from api.text import model_files
from common import rpc
from common.config import ModelConfig, RouterConfig
from protos import router_pb2 as pb
from tests.api.models import CHAT_TEMPLATE, Spoken, write_model
from tests.api.rig import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ON_ANY_PORT,
    Client,
    Served,
    collect,
    eventually,
    fails,
)
from tests.support.network.http_client import post
from tests.support.processes.stub_decode_node import StubDecodeNode


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models whose tokenizers and vocabularies differ. Only `b` has a chat template."""
    a, b = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    markers = ("<more>", "the")
    return {
        "a": write_model(a),
        "b": write_model(b, vocabulary_size=400, markers=markers, chat_template=CHAT_TEMPLATE),
    }


async def value(served: Served, name: str) -> str:
    """Return the value of a series of /metrics."""
    lines = (await served.get("/metrics")).body.decode().splitlines()
    return next(line.split()[-1] for line in lines if line.startswith(f"{name} "))


def ready(served: Served) -> bool:
    return served.router.pools[served.model].ready


@asynccontextmanager
async def two_models(
    checkpoints: dict[str, Path], **settings: Any
) -> AsyncIterator[tuple[Served, Served]]:
    """Yield the models `a` and `b` of one router, with one node for each."""
    async with StubDecodeNode() as a, StubDecodeNode() as b:
        nodes = {"a": a, "b": b}
        for name, node in nodes.items():
            node.description.model = str(checkpoints[name])
        models = tuple(
            ModelConfig(
                model=str(path), served_model_name=name, decode=(nodes[name].address,), **settings
            )
            for name, path in checkpoints.items()
        )
        config = RouterConfig(server=ON_ANY_PORT, http_port=0, models=models)
        files = [model_files.load(each.model) for each in config.each_model]
        async with run_router(config, files) as router:
            async with rpc.make_channel(f"127.0.0.1:{router.port}") as channel:
                client = Client(channel)
                one, other = (
                    Served(nodes[name], router, client, name, Spoken(path))
                    for name, path in checkpoints.items()
                )
                await eventually(lambda: ready(one) and ready(other))
                yield one, other


async def test_a_request_goes_to_a_node_of_the_model_that_it_names(checkpoints):
    async with two_models(checkpoints) as (a, b):
        prompt = "the quick fox"
        for each, name in ((a, "a"), (b, "b")):
            submit, answer = await each.ask(COMPLETIONS, "to you", model=name, prompt=prompt)
            assert each.text(submit.token_ids).endswith(prompt)
            assert answer.json["model"] == name
            assert answer.json["choices"][0]["text"] == "to you"
            # The same over gRPC.
            calling = collect(each.grpc.generate(prompt, model=name))
            submit, answer = await each.answered(calling, "to you")
            assert answer[0] == "to you"
            tokenized = await each.post("/tokenize", model=name, prompt=prompt)
            asking = each.grpc.stub.Tokenize(pb.TokenizeRequest(text=prompt, model=name))
            assert [*(await asking).token_ids] == tokenized.json["tokens"] == submit.token_ids
        assert (await a.post(CHAT, model="a", messages=HELLO)).status == 400
        await b.ask(CHAT, model="b", messages=HELLO)
        assert await value(b, 'baton_requests_total{model="a",outcome="stop"}') == "2.0"
        assert await value(b, 'baton_requests_total{model="b",outcome="stop"}') == "3.0"
        listed = (await a.get("/requests")).json["requests"]
        assert sorted(each["model"] for each in listed) == [*"aabbb"]


async def test_an_unknown_or_missing_model_is_rejected_with_the_list(checkpoints):
    async with two_models(checkpoints) as (a, b):
        answer = await a.post(COMPLETIONS, model="c", prompt="x")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "'a', 'b' are served" in answer.error["message"]
        answer = await a.post("/v1/messages", model="c", max_tokens=1, messages=[])
        assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
        answer = await a.post(COMPLETIONS, prompt="x")
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert "'a', 'b'" in answer.error["message"]
        assert (await a.get("/v1/models/c")).status == 404
        assert (await a.post(COMPLETIONS, model=7, prompt="x")).status == 400
        for body in (b"{", b"\xff", b'{"prompt":' + b"[" * 10_000):
            assert (await post(b.router.http_port, COMPLETIONS, body)).status == 400
        await fails(b.grpc.generate("x", model="c"), StatusCode.NOT_FOUND, "'a', 'b'")
        await fails(b.grpc.generate("x"), StatusCode.INVALID_ARGUMENT, "'a', 'b'")
        rejected = 'baton_requests_rejected_total{model="",reason="invalid"}'
        assert await value(b, rejected) == "3.0"


async def test_a_model_without_nodes_does_not_affect_the_other(checkpoints):
    async with two_models(checkpoints) as (a, b):
        a.node.change_status(state="draining")
        await eventually(lambda: not ready(a))
        answer = await a.post(COMPLETIONS, model="a", prompt="x")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "model 'a': no decode node" in answer.error["message"]
        await b.ask(COMPLETIONS, model="b", prompt="x")
        states = await b.get("/ready")
        assert (states.status, states.json["models"]["b"]) == (200, "ready")
        assert states.json["models"]["a"].startswith("no decode node")
        await b.grpc.wait_until_serving()
        assert await value(b, 'baton_ready{model="a"}') == "0.0"
        assert await value(b, 'baton_ready{model="b"}') == "1.0"
        reported = (await b.grpc.stub.GetCluster(pb.GetClusterRequest())).router
        assert (reported.state, reported.model) == ("ready", "a, b")
        assert [each.state for each in reported.models] == ["not ready", "ready"]
        b.node.change_status(state="draining")
        await eventually(lambda: not ready(b))
        assert (await a.get("/ready")).status == 503
        await b.grpc.wait_until_serving(False)


async def test_a_full_model_takes_no_slots_of_the_other(checkpoints):
    async with two_models(checkpoints, max_concurrent_requests=1) as (a, b):
        held = asyncio.create_task(a.post(COMPLETIONS, model="a", prompt="x"))
        await a.node.submitted()
        await b.ask(COMPLETIONS, model="b", prompt="x")
        held.cancel()


async def test_adapters_of_the_same_name_belong_to_their_model(checkpoints):
    async with two_models(checkpoints) as (a, b):
        for name, node in (("a", a.node), ("b", b.node)):
            for adapter in ("sql", f"{name}-own"):
                fields = {"lora_name": adapter, "lora_path": f"{name}/{adapter}"}
                loaded = await a.post("/v1/load_lora_adapter", model=name, **fields)
                assert loaded.status == 200
            assert len(node.adapters) == 2
        listed = (await a.get("/v1/models")).json["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [
            ("a", None),
            ("b", None),
            ("a-own", "a"),
            ("a:sql", "a"),
            ("b-own", "b"),
            ("b:sql", "b"),
        ]
        sql = b.node.adapters["sql"]
        assert sql != a.node.adapters["sql"]
        for fields in ({"model": "b:sql"}, {"model": "b", "lora_path": "sql"}):
            submit, _ = await b.ask(COMPLETIONS, prompt="x", **fields)
            assert submit.adapter == sql
        await a.ask(COMPLETIONS, prompt="x", model="a-own")
        answer = await a.post(COMPLETIONS, prompt="x", model="sql")
        assert answer.status == 400
        assert "'a:sql' or 'b:sql'" in answer.error["message"]
        fields = {"model": "a", "lora_name": "b", "lora_path": "p"}
        assert (await a.post("/v1/load_lora_adapter", **fields)).status == 400


async def test_an_operator_command_can_select_one_model(checkpoints):
    async with two_models(checkpoints) as (a, b):
        assert (await a.post("/pause_generation", model="b")).status == 200
        assert (a.node.paused, b.node.paused) == ("", "abort")
        assert (await a.post("/flush_cache")).error["param"] == "model"
        unnamed = b.grpc.stub.Pause(pb.PauseRequest())
        await fails(unnamed, StatusCode.INVALID_ARGUMENT, "'a', 'b'")
        for name in "ab":
            plan = pb.Plan(model=name, pressures={"decode": 0.5}, acts=name == "b")
            await b.grpc.stub.ReportPlan(pb.ReportPlanRequest(plan=plan))
        plans = (await b.grpc.stub.GetCluster(pb.GetClusterRequest())).plans
        assert [(plan.model, plan.acts) for plan in plans] == [("a", False), ("b", True)]


async def test_a_node_listed_under_another_model_gets_no_requests(checkpoints):
    async with two_models(checkpoints) as (a, b):
        b.node.description.model = str(checkpoints["a"])
        await eventually(lambda: not ready(b))
        assert ready(a)
        nodes = (await b.grpc.stub.GetCluster(pb.GetClusterRequest())).nodes
        assert [(each.served_model, each.state) for each in nodes] == [
            ("a", "ready"),
            ("b", "unhealthy"),
        ]
