"""Embeddings and scores at the router: calls of prefill nodes, their results, and rejections
before any call."""

import asyncio
import json
import math
import struct
from base64 import b64decode
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tokenizers import Tokenizer

from common.errors import (
    ConfigError,
    EngineDied,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    QueueFull,
)
from protos.pooling_pb2 import POOL_FIRST, POOL_LABELS, POOL_LAST, POOL_MEAN, POOL_TOKENS
from protos.router_pb2 import GetClusterRequest
from router.policy.load import DecodeChoice, NodeBacklogs, NodeLoad, PlacementKey, PrefillChoice
from router.policy.policies import NAMES, make_policy
from router.policy.prefix_index import PrefixIndex
from tests.api.models import CONTEXT_LENGTH, VOCABULARY_SIZE, ids, write_model
from tests.api.rig import WAIT_S, eventually, router_for
from tests.support.network.http_client import get, post
from tests.support.processes.stub_pooling_node import StubPoolingNode

EMBEDDINGS = "/v1/embeddings"
ONE_ITEM = {"query": "a", "items": ["b"]}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path)


class Site:
    def __init__(self, nodes, router, client):
        self.nodes, self.router, self.client = nodes, router, client

    async def post(self, path, **fields):
        return await post(self.router.http_port, path, fields)

    @property
    def calls(self):
        return [call for node in self.nodes for call in node.calls]


@asynccontextmanager
async def site(model, *, num_nodes=1, **knobs):
    """A ready router without decode nodes."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(StubPoolingNode()) for _ in range(num_nodes)]
        addresses = [node.address for node in nodes]
        client, router = await stack.enter_async_context(
            router_for(model, decode=[], prefill=addresses, **knobs)
        )
        await client.wait_until_serving()
        for node in nodes:
            await eventually(lambda node=node: node.num_described)
        # Their reports have arrived at the router when it has asked all of them again.
        await client.stub.GetCluster(GetClusterRequest(), timeout=WAIT_S)
        yield Site(nodes, router, client)


@pytest.fixture
async def rig(model):
    async with site(model) as rig:
        yield rig


def with_config(model, **fields):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


async def test_a_model_without_decode_nodes_generates_nothing(rig):
    info = (await get(rig.router.http_port, "/get_model_info")).json
    assert info["is_generation"] is False


async def test_every_input_format_becomes_token_ids_and_vectors_are_in_order(rig):
    reported = (await rig.post(EMBEDDINGS, input=["the fox", "dog"])).json
    lengths = [1 + len(ids(text)) for text in ("the fox", "dog")]
    assert [each["embedding"][0] for each in reported["data"]] == lengths
    total = sum(lengths)
    assert reported["usage"] == {"prompt_tokens": total, "total_tokens": total}
    empty = await rig.post(EMBEDDINGS, input="")  # it has the token that starts every text
    assert empty.json["usage"]["prompt_tokens"] == 1
    for given in ([5, 6, 7], [[5, 6, 7]]):
        (only,) = (await rig.post(EMBEDDINGS, input=given)).json["data"]
        assert only == {"object": "embedding", "index": 0, "embedding": [3.0, 5.0]}
    (text,) = (await rig.post(EMBEDDINGS, input=[9, 8], encoding_format="base64")).json["data"]
    assert b64decode(text["embedding"]) == struct.pack("<2f", 2.0, 9.0)
    assert {(call.pool, call.normalize) for call in rig.calls} == {(POOL_LAST, True)}


async def test_a_checkpoint_configures_its_pooling(model):
    (model / "1_Pooling").mkdir()
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": 2, "pooling_mode_mean_tokens": True}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with_config(model, matryoshka_dimensions=[1, 2])
    async with site(model) as rig:
        assert (await rig.post(EMBEDDINGS, input="a", dimensions=1)).status == 200
        (call,) = rig.calls
        assert (call.pool, call.normalize, call.dimensions) == (POOL_MEAN, False, 1)
        refused = await rig.post(EMBEDDINGS, input="a", dimensions=3)
        assert refused.error["message"] == "dimensions is 3, the model has 1, 2"
    async with site(model, pooling_type="cls") as rig:
        await rig.post(EMBEDDINGS, input="a")
        assert rig.calls[0].pool == POOL_FIRST
    modules.append({"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (model / "modules.json").write_text(json.dumps(modules))
    async with site(model) as rig:
        assert "Dense" in (await rig.post(EMBEDDINGS, input="a")).error["message"]
        assert not rig.calls


async def test_a_classifier_scores_pairs_and_a_generator_compares_embeddings(model):
    fields = {"query": "a", "documents": ["b", "ccc", {"text": "dd"}]}
    async with site(model) as rig:
        results = (await rig.post("/rerank", top_n=2, **fields)).json["results"]
        assert [set(each) for each in results] == [{"index", "relevance_score", "document"}] * 2
        assert all(-1.0 <= each["relevance_score"] <= 1.0 for each in results)
        rig.nodes[0].vector = lambda token_ids: [1.0] * 3  # whose cosine is 1 + 2 ** -52
        same = (await rig.post("/score", text_1="a", text_2="b")).json["data"]
        assert same[0]["score"] == 1.0
    with_config(model, architectures=["LlamaForSequenceClassification"])
    async with site(model) as rig:
        rig.nodes[0].vector = lambda token_ids: [len(token_ids) - 4.0]
        reported = (await rig.post("/v1/rerank", return_documents=False, **fields)).json
        # This tokenizer joins the texts of a pair unchanged, without the token that starts one.
        expected = [1 / (1 + math.exp(4.0 - n)) for n in (4, 3, 2)]
        assert [each["index"] for each in reported["results"]] == [1, 2, 0]
        found = [each["relevance_score"] for each in reported["results"]]
        assert found == pytest.approx(expected)
        assert reported["usage"]["total_tokens"] == 4 + 3 + 2
        scores = await rig.post("/v1/score", text_1="a", text_2=["b", "ccc", "dd"])
        assert [each["score"] for each in scores.json["data"]] == pytest.approx(
            [expected[2], expected[0], expected[1]]
        )
        assert {call.pool for call in rig.calls} == {POOL_LABELS}
        refused = await rig.post(EMBEDDINGS, input="a")
        assert "does not compute embeddings" in refused.error["message"]
        rig.nodes[0].vector = lambda token_ids: [0.0, 1.0]
        refused = await rig.post("/score", text_1="a", text_2="b")
        assert "2 classes" in refused.error["message"]


async def test_a_reranker_is_prompted_for_yes_or_no(tmp_path, model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    yes, no = 318, 319
    vocabulary = json.loads(tokenizer.to_str())
    vocabulary["model"]["vocab"] |= {"yes": yes, "no": no}
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    with_config(model, max_position_embeddings=2048)
    async with site(model, reranker="qwen3") as rig:
        rig.nodes[0].vector = lambda token_ids: [math.log(0.1), math.log(0.3)]
        fields = {"query": "who?", "documents": ["bob"], "instruct": "find people"}
        (ranked,) = (await rig.post("/rerank", **fields)).json["results"]
        assert ranked["relevance_score"] == pytest.approx(0.25)
        (call,) = rig.calls
        assert (call.pool, *call.label_token_ids) == (POOL_TOKENS, yes, no)
        reported = tokenizer.decode(list(call.prompts[0].ids))
        asked = "<Instruct>: find people\n<Query>: who?\n<Document>: bob<|im_end|>"
        assert asked in reported
        assert reported.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match="token for yes"):
        async with site(write_model(tmp_path), reranker="qwen3"):
            pass


async def test_labels_are_scored_after_texts_or_after_token_ids(rig):
    rig.nodes[0].vector = lambda token_ids: [math.log(0.1), math.log(0.3)]
    fields = {"query": [5], "items": [[6, 7], [8]], "label_token_ids": [1, 2]}
    plain = (await rig.post("/v1/score", **fields)).json
    assert plain["object"] == "scoring"
    assert plain["scores"] == [pytest.approx([0.1, 0.3])] * 2
    within = (await rig.post("/v1/score", apply_softmax=True, item_first=True, **fields)).json
    assert within["scores"] == [pytest.approx([0.25, 0.75])] * 2
    assert [list(each.ids) for call in rig.calls for each in call.prompts] == [
        *([5, 6, 7], [5, 8]),
        *([6, 7, 5], [8, 5]),
    ]
    assert {(call.pool, *call.label_token_ids) for call in rig.calls} == {(POOL_TOKENS, 1, 2)}


async def test_many_inputs_are_sent_to_all_nodes_in_several_calls(model):
    async with site(model, num_nodes=2) as rig:
        inputs = [[number % 250 + 2] * (number % 9 + 1) for number in range(300)]
        reported = (await rig.post(EMBEDDINGS, input=inputs)).json
        assert [each["embedding"] for each in reported["data"]] == [
            [float(len(each)), float(each[0])] for each in inputs
        ]
        assert all(node.calls for node in rig.nodes)
        assert max(len(call.prompts) for call in rig.calls) == 32


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_orders_prefill_nodes_for_calls_without_a_decode_node(name):
    nobody = DecodeChoice("", (PrefillChoice("a"), PrefillChoice("b")))
    load = NodeLoad()
    policy = make_policy(name, load, NodeBacklogs(load), PrefixIndex())
    for tokens in ([1], list(range(100))):
        assert set(policy.pick(PlacementKey(tokens), [nobody]).prefill) == {"a", "b"}


@pytest.mark.parametrize(
    "error", [NodeUnavailable("drains"), Overloaded("full"), EngineDied("gone")]
)
async def test_a_node_that_fails_is_replaced_by_another(model, error):
    async with site(model, num_nodes=2) as rig:
        first, second = rig.nodes
        first.fails = error
        for _ in range(4):
            assert (await rig.post(EMBEDDINGS, input=[5])).status == 200
        assert first.calls
        assert {call.engine_crashes for call in first.calls} == {0}
        assert max(call.engine_crashes for call in second.calls) == isinstance(error, EngineDied)


@pytest.mark.parametrize(
    "error, status",
    [
        (InvalidRequest("label_token_ids: none such"), 400),
        (Overloaded("full"), 429),
        (QueueFull("late", 7.0), 429),
        (NodeUnavailable("drains"), 503),
    ],
)
async def test_an_error_of_all_nodes_is_returned(model, error, status):
    async with site(model, num_nodes=2) as rig:
        for node in rig.nodes:
            node.fails = error
        refused = await rig.post(EMBEDDINGS, input=[5])
        assert refused.status == status
        assert refused.error["message"] == str(error)
        assert not rig.router.admission.num_live


async def test_a_client_that_disconnects_cancels_its_calls(rig):
    (node,) = rig.nodes
    node.pooling.clear()
    asking = asyncio.create_task(rig.post(EMBEDDINGS, input=[5]))
    await eventually(lambda: node.calls)
    asking.cancel()
    await eventually(lambda: node.num_cancelled)
    await eventually(lambda: not rig.router.admission.num_live)


WRONG = [
    (EMBEDDINGS, {}, "input"),
    (EMBEDDINGS, {"input": []}, "input is empty"),
    (EMBEDDINGS, {"input": ["a", 5]}, "input mixes"),
    (EMBEDDINGS, {"input": [[]]}, "empty"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "2048 allowed"),
    (EMBEDDINGS, {"input": [5] * CONTEXT_LENGTH}, "accepts prompts of at most"),
    (EMBEDDINGS, {"input": [VOCABULARY_SIZE]}, "outside the vocabulary"),
    (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
    (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (EMBEDDINGS, {"input": "a", "cache_salt": ""}, "cache_salt is empty"),
    (EMBEDDINGS, {"input": "a", "model": "other"}, "there is no model"),
    ("/v1/score", {"text_1": "a"}, "text_2 is missing"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_2"),
    ("/v1/score", ONE_ITEM, "label_token_ids is missing"),
    ("/v1/score", {"query": "a", "items": [[5]], "label_token_ids": [1]}, "both texts"),
    ("/v1/score", {**ONE_ITEM, "label_token_ids": [VOCABULARY_SIZE]}, "label_token_ids"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "a", "documents": ["b"], "instruct": "c"}, "instruct is not supp"),
]


async def test_invalid_input_is_rejected_by_name_before_a_node_gets_it(rig):
    for path, fields, said in WRONG:
        answer = await rig.post(path, **fields)
        assert answer.status in (400, 404)
        assert said in answer.error["message"]
        assert not rig.calls


async def test_a_router_without_prefill_nodes_reports_it(node, router):
    for path, fields in ((EMBEDDINGS, {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
        refused = await post(router.http_port, path, fields)
        assert refused.status == 400
        assert "and this router has none" in refused.error["message"]


async def test_pooled_inputs_are_counted(rig):
    await rig.post(EMBEDDINGS, input=[[5, 6], [7]])
    text = (await get(rig.router.http_port, "/metrics")).body.decode()
    assert 'baton_requests_total{outcome="pooled"} 1.0' in text
    (ended,) = (await get(rig.router.http_port, "/requests")).json["requests"]
    assert (ended["outcome"], ended["prompt_tokens"]) == ("pooled", 3)
