"""LoRA adapters for clients and operators: names of models, and loading on all nodes or none."""

import msgspec
import pytest
from grpc import StatusCode

from common.requests.namespace import namespace_of, within
from protos import router_pb2
from tests.api.rig import CHAT, COMPLETIONS, HELLO, api_for, eventually, fails, served, two_nodes

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL, POEMS = b"s" * 16, b"p" * 16


async def reported(api, **adapters: bytes) -> None:
    api.node.adapters = adapters
    api.node.adapters_changed()
    await eventually(lambda: api.router.cluster.adapters.by_name() == adapters)


@pytest.mark.parametrize(
    "path, asked",
    [
        (COMPLETIONS, {"model": "sql", "prompt": "x"}),
        (CHAT, {"model": "sql", "messages": HELLO}),
        (COMPLETIONS, {"lora_path": "sql", "prompt": "x"}),
        ("/generate", {"lora_path": "sql", "text": "x"}),
        ("/v1/responses", {"model": "sql", "input": "x"}),
        ("/v1/messages", {"model": "sql", "max_tokens": 4, "messages": HELLO}),
    ],
)
async def test_an_adapter_requested_as_a_model_is_sent_to_the_node_by_its_hash(api, path, asked):
    await reported(api, sql=SQL, poems=POEMS)
    submit, answer = await api.ask(path, "done", **asked)
    assert (answer.status, submit.adapter) == (200, SQL)
    if path != "/generate":
        assert answer.json["model"] == "sql"


async def test_the_model_itself_is_requested_without_an_adapter(api):
    await reported(api, sql=SQL)
    submit, answer = await api.ask(COMPLETIONS, model=api.model, prompt="x")
    assert answer.json["model"] == api.model
    assert submit.adapter == b""


async def test_an_adapter_that_no_node_has_is_an_unknown_model(api):
    await reported(api, sql=SQL)
    for path, asked in (
        (COMPLETIONS, {"model": "sqll", "prompt": "x"}),
        (CHAT, {"lora_path": "sqll", "messages": HELLO}),
    ):
        answer = await api.post(path, **asked)
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert f"'sqll' here; '{api.model}', 'sql' are served" in answer.error["message"]
    assert await api.refused(COMPLETIONS, model="sql", lora_path=api.model, prompt="x") == (
        400,
        "lora_path",
    )
    await reported(api)
    answer = await api.post(COMPLETIONS, model="sql", prompt="x")
    assert answer.status == 404


async def test_adapters_are_rejected_for_embeddings(api):
    await reported(api, sql=SQL)
    assert await api.refused("/v1/embeddings", model="sql", input="x") == (400, "model")
    answer = await api.post("/tokenize", model="sql", prompt="x")
    assert answer.status == 200


async def test_models_are_listed_with_their_adapters(api):
    await reported(api, sql=SQL, poems=POEMS)
    listed = msgspec.json.decode((await api.get("/v1/models")).body)["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [
        (api.model, None),
        ("poems", api.model),
        ("sql", api.model),
    ]
    assert (await api.client.models.retrieve("sql")).id == "sql"
    assert (await api.get("/v1/models/nothing")).status == 404


async def test_over_grpc_an_adapter_is_a_field(model):
    async with served(model) as (client, node, router):
        node.adapters = {"sql": SQL}
        node.adapters_changed()
        await eventually(lambda: router.cluster.adapters.by_name())
        call = client.generate("x", adapter="sql", cache_salt="salt")
        submit = await node.submitted()
        assert submit.adapter == SQL
        # The node separates its KV by adapter. The router passes on only the client's salt.
        assert submit.namespace == namespace_of("salt") != within(submit.namespace, SQL)
        call.cancel()
        error = await fails(client.generate("x", adapter="other"), StatusCode.NOT_FOUND)
        assert error.details() == "adapter: 'other' is not loaded"


async def test_only_decode_nodes_with_the_adapter_get_the_request(model):
    async with two_nodes(model) as (client, router, one, other):
        other.adapters = {"sql": SQL}
        other.adapters_changed()
        await eventually(lambda: router.cluster.adapters.by_name())
        calls = [client.generate("x", adapter="sql") for _ in range(4)]
        assert [(await other.submitted()).adapter for _ in calls] == [SQL] * 4
        assert not any(message.submits for message in one.received)
        for call in calls:
            call.cancel()


async def test_an_adapter_is_loaded_on_all_nodes_before_the_call_returns(pair):
    prefill, decode = pair.prefill, pair.decode
    done = await pair.post(LOAD, lora_name="sql", lora_path="a/b")
    assert (done.status, done.body) == (200, b"Success: LoRA adapter 'sql' added successfully.")
    assert prefill.adapters == decode.adapters == pair.router.cluster.adapters.by_name()
    again = await pair.client.stub.LoadAdapter(
        router_pb2.LoadAdapterRequest(name="sql", path="a/b")
    )
    assert (again.id, again.fresh) == (prefill.adapters["sql"], False)
    done = await pair.post(UNLOAD, lora_name="sql")
    assert done.status == 200
    assert prefill.adapters == decode.adapters == pair.router.cluster.adapters.by_name() == {}
    for_nothing = await pair.post(UNLOAD, lora_name="sql")
    assert (for_nothing.status, for_nothing.error["param"]) == (404, None)


async def test_if_one_node_rejects_an_adapter_those_that_loaded_it_now_unload_it(pair):
    prefill, decode = pair.prefill, pair.decode
    prefill.refuses_adapters = "rank 64, engine.lora.max_rank is 32"
    asked = {"lora_name": "sql", "lora_path": "a"}
    refused = await pair.post(LOAD, **asked)
    assert (refused.status, refused.error["param"]) == (400, "lora_path")
    assert f"prefill node {prefill.address}: rank 64" in refused.error["message"]
    assert decode.adapters == {}
    prefill.refuses_adapters = ""
    prefill.calls_adapters = {"a": POEMS}
    refused = await pair.post(LOAD, **asked)
    assert "nodes have read different adapters" in refused.error["message"]
    assert prefill.adapters == decode.adapters == {}


async def test_an_adapter_may_not_have_the_name_of_the_model(model):
    async with api_for(model, served_model_name="fox") as api:
        assert await api.refused(LOAD, lora_name="fox", lora_path="a") == (400, "lora_name")
