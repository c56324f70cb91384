"""Several models behind one router, each with its own stub node."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from api.program.assembly import RunningRouter, run_router
from api.text import model_files
from common import rpc
from common.config import ModelConfig, RouterConfig
from protos import router_pb2 as pb
from protos.decode_pb2 import FINISH_REASON_STOP
from tests.api.models import CHAT_TEMPLATE, Spoken, write_model
from tests.api.rig import COMPLETIONS, ON_ANY_PORT, Client, collect, eventually, fails
from tests.support.network.http_client import Response, get, post
from tests.support.processes.stub_decode_node import StubDecodeNode, Submission

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models whose tokenizers and vocabularies differ. Only `b` has a chat template."""
    a, b = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    markers = ("<more>", "the")
    return {
        "a": write_model(a),
        "b": write_model(b, vocabulary_size=400, markers=markers, chat_template=CHAT_TEMPLATE),
    }


@dataclass(frozen=True, slots=True)
class Two:
    """A router of the models `a` and `b`, with one node for each."""

    client: Client
    router: RunningRouter
    nodes: dict[str, StubDecodeNode]
    spoken: dict[str, Spoken]

    async def post(self, path: str, /, **fields: Any) -> Response:
        return await post(self.router.http_port, path, fields)

    async def get(self, path: str) -> Response:
        return await get(self.router.http_port, path)

    async def answered(
        self, model: str, asking: Coroutine[Any, Any, Response]
    ) -> tuple[Submission, Response]:
        """Let the node of a model answer a request, with the name of the model."""
        asked = asyncio.create_task(asking)
        submit = await self.nodes[model].submitted()
        ids = self.spoken[model].ids(f"by {model}")
        self.nodes[model].finish(submit.number, ids, FINISH_REASON_STOP)
        return submit, await asked

    async def value(self, name: str) -> str:
        """The value of a series of /metrics."""
        lines = (await self.get("/metrics")).body.decode().splitlines()
        return next(line.split()[-1] for line in lines if line.startswith(f"{name} "))

    def ready(self, model: str) -> bool:
        return self.router.pools[model].ready


@asynccontextmanager
async def two_models(checkpoints: dict[str, Path], **settings: Any) -> AsyncIterator[Two]:
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
                spoken = {name: Spoken(path) for name, path in checkpoints.items()}
                two = Two(Client(channel), router, nodes, spoken)
                await eventually(lambda: two.ready("a") and two.ready("b"))
                yield two


async def test_a_request_goes_to_a_node_of_the_model_that_it_names(checkpoints):
    async with two_models(checkpoints) as two:
        prompt = "the quick fox"
        for name in "ab":
            asking = two.post(COMPLETIONS, model=name, prompt=prompt)
            submit, answer = await two.answered(name, asking)
            assert two.spoken[name].text(submit.token_ids).endswith(prompt)
            assert answer.json["model"] == name
            assert answer.json["choices"][0]["text"] == f"by {name}"
            # The same over gRPC.
            calling = collect(two.client.generate(prompt, model=name))
            submit, answer = await two.answered(name, calling)
            assert answer[0] == f"by {name}"
            tokenized = await two.post("/tokenize", model=name, prompt=prompt)
            asking = two.client.stub.Tokenize(pb.TokenizeRequest(text=prompt, model=name))
            assert [*(await asking).token_ids] == tokenized.json["tokens"] == submit.token_ids
        assert (await two.post("/v1/chat/completions", model="a", **CHAT)).status == 400
        _, answer = await two.answered("b", two.post("/v1/chat/completions", model="b", **CHAT))
        assert answer.status == 200
        assert await two.value('baton_requests_total{model="a",outcome="stop"}') == "2.0"
        assert await two.value('baton_requests_total{model="b",outcome="stop"}') == "3.0"
        listed = (await two.get("/requests")).json["requests"]
        assert sorted(each["model"] for each in listed) == [*"aabbb"]


async def test_an_unknown_or_missing_model_is_rejected_with_the_list(checkpoints):
    async with two_models(checkpoints) as two:
        answer = await two.post(COMPLETIONS, model="c", prompt="x")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "'a', 'b' are served" in answer.error["message"]
        answer = await two.post("/v1/messages", model="c", max_tokens=1, messages=[])
        assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
        answer = await two.post(COMPLETIONS, prompt="x")
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert "'a', 'b'" in answer.error["message"]
        assert (await two.get("/v1/models/c")).status == 404
        assert (await two.post(COMPLETIONS, model=7, prompt="x")).status == 400
        for body in (b"{", b"\xff", b'{"prompt":' + b"[" * 10_000):
            assert (await post(two.router.http_port, COMPLETIONS, body)).status == 400
        await fails(two.client.generate("x", model="c"), StatusCode.NOT_FOUND, "'a', 'b'")
        await fails(two.client.generate("x"), StatusCode.INVALID_ARGUMENT, "'a', 'b'")
        rejected = 'baton_requests_rejected_total{model="",reason="invalid"}'
        assert await two.value(rejected) == "3.0"


async def test_a_model_without_nodes_does_not_affect_the_other(checkpoints):
    async with two_models(checkpoints) as two:
        two.nodes["a"].change_status(state="draining")
        await eventually(lambda: not two.ready("a"))
        answer = await two.post(COMPLETIONS, model="a", prompt="x")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "model 'a': no decode node" in answer.error["message"]
        _, answer = await two.answered("b", two.post(COMPLETIONS, model="b", prompt="x"))
        assert answer.status == 200
        ready = await two.get("/ready")
        assert (ready.status, ready.json["models"]["b"]) == (200, "ready")
        assert ready.json["models"]["a"].startswith("no decode node")
        await two.client.wait_until_serving()
        assert await two.value('baton_ready{model="a"}') == "0.0"
        assert await two.value('baton_ready{model="b"}') == "1.0"
        reported = (await two.client.stub.GetCluster(pb.GetClusterRequest())).router
        assert (reported.state, reported.model) == ("ready", "a, b")
        assert [each.state for each in reported.models] == ["not ready", "ready"]
        two.nodes["b"].change_status(state="draining")
        await eventually(lambda: not two.ready("b"))
        assert (await two.get("/ready")).status == 503
        await two.client.wait_until_serving(False)


async def test_a_full_model_takes_no_slots_of_the_other(checkpoints):
    async with two_models(checkpoints, max_concurrent_requests=1) as two:
        held = asyncio.create_task(two.post(COMPLETIONS, model="a", prompt="x"))
        await two.nodes["a"].submitted()
        _, answer = await two.answered("b", two.post(COMPLETIONS, model="b", prompt="x"))
        assert answer.status == 200
        held.cancel()


async def test_adapters_of_the_same_name_belong_to_their_model(checkpoints):
    async with two_models(checkpoints) as two:
        for name, node in two.nodes.items():
            for adapter in ("sql", f"{name}-own"):
                fields = {"lora_name": adapter, "lora_path": f"{name}/{adapter}"}
                loaded = await two.post("/v1/load_lora_adapter", model=name, **fields)
                assert loaded.status == 200
            assert len(node.adapters) == 2
        listed = (await two.get("/v1/models")).json["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [
            ("a", None),
            ("b", None),
            ("a-own", "a"),
            ("a:sql", "a"),
            ("b-own", "b"),
            ("b:sql", "b"),
        ]
        sql = two.nodes["b"].adapters["sql"]
        assert sql != two.nodes["a"].adapters["sql"]
        for fields in ({"model": "b:sql"}, {"model": "b", "lora_path": "sql"}):
            submit, answer = await two.answered("b", two.post(COMPLETIONS, prompt="x", **fields))
            assert (submit.adapter, answer.status) == (sql, 200)
        _, answer = await two.answered("a", two.post(COMPLETIONS, prompt="x", model="a-own"))
        assert answer.status == 200
        answer = await two.post(COMPLETIONS, prompt="x", model="sql")
        assert answer.status == 400
        assert "'a:sql' or 'b:sql'" in answer.error["message"]
        fields = {"model": "a", "lora_name": "b", "lora_path": "p"}
        assert (await two.post("/v1/load_lora_adapter", **fields)).status == 400


async def test_an_operator_command_can_select_one_model(checkpoints):
    async with two_models(checkpoints) as two:
        assert (await two.post("/pause_generation", model="b")).status == 200
        assert (two.nodes["a"].paused, two.nodes["b"].paused) == ("", "abort")
        assert (await two.post("/flush_cache")).error["param"] == "model"
        unnamed = two.client.stub.Pause(pb.PauseRequest())
        await fails(unnamed, StatusCode.INVALID_ARGUMENT, "'a', 'b'")
        for name in "ab":
            plan = pb.Plan(model=name, pressures={"decode": 0.5}, acts=name == "b")
            await two.client.stub.ReportPlan(pb.ReportPlanRequest(plan=plan))
        plans = (await two.client.stub.GetCluster(pb.GetClusterRequest())).plans
        assert [(plan.model, plan.acts) for plan in plans] == [("a", False), ("b", True)]


async def test_a_node_listed_under_another_model_gets_no_requests(checkpoints):
    async with two_models(checkpoints) as two:
        two.nodes["b"].description.model = str(checkpoints["a"])
        await eventually(lambda: not two.ready("b"))
        assert two.ready("a")
        nodes = (await two.client.stub.GetCluster(pb.GetClusterRequest())).nodes
        assert [(each.served_model, each.state) for each in nodes] == [
            ("a", "ready"),
            ("b", "unhealthy"),
        ]
