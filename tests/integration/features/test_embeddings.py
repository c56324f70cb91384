"""Embeddings and scores through a router and two prefill nodes, without a decode node. Compared
with transformers."""

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from protos.router_pb2 import EmbedRequest, Input, ScoreRequest, TokenIds
from tests.support.models.checkpoints import make_checkpoint
from tests.support.network.http_client import get, post
from tests.support.processes.cluster import Cluster

pytestmark = pytest.mark.asyncio

TEXTS = ["the owl", "a much longer text about the same owl " * 5, "x"]


def ids(text: str) -> list[int]:
    """Return the token ids by the byte-level tokenizer of every tiny checkpoint."""
    return list(text.encode())


def embedded(model, text: str) -> torch.Tensor:
    with torch.no_grad():
        last = model(torch.tensor([ids(text)])).last_hidden_state[0, -1]
    return last / last.norm()


def close(found, expected) -> None:
    found = torch.tensor(np.array(found), dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def cluster_of(directory, logs) -> Cluster:
    return Cluster(
        directory,
        logs,
        num_prefill=2,
        num_decode=0,
        paired=False,
        node_flags=["--engine.scheduler.chunked-prefill-tokens=64"],
    )


async def test_prefill_nodes_alone_embed_and_score_like_transformers(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "qwen3")
    model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    expected = [embedded(model, text) for text in TEXTS]
    async with cluster_of(directory, tmp_path) as cluster:
        url = f"http://127.0.0.1:{cluster.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            name = (await client.models.list()).data[0].id
            for given in (TEXTS, [ids(text) for text in TEXTS]):
                # Without a format the client requests base64 and decodes it.
                for how in ({}, {"encoding_format": "float"}):
                    answer = await client.embeddings.create(model=name, input=given, **how)
                    assert answer.usage.prompt_tokens == sum(len(ids(text)) for text in TEXTS)
                    assert [each.index for each in answer.data] == [0, 1, 2]
                    for each, vector in zip(answer.data, expected, strict=True):
                        close(each.embedding, vector)
            (cut,) = (await client.embeddings.create(model=name, input="x", dimensions=5)).data
            close(cut.embedding, expected[2][:5] / expected[2][:5].norm())
            with pytest.raises(openai.BadRequestError, match="the model has 64"):
                await client.embeddings.create(model=name, input="x", dimensions=65)
            with pytest.raises(openai.InternalServerError, match="no decode node"):
                await client.completions.create(model=name, prompt="x")
        port = cluster.http_port
        assert (await get(port, "/ready")).status == 200
        # Scores of a model without a score head are cosines.
        fields = {"query": TEXTS[0], "documents": [TEXTS[2], TEXTS[0], {"text": TEXTS[1]}]}
        reranked = (await post(port, "/v1/rerank", fields)).json["results"]
        cosines = {0: expected[0] @ expected[2], 1: torch.tensor(1.0), 2: expected[0] @ expected[1]}
        assert [each["index"] for each in reranked] == sorted(cosines, key=lambda i: -cosines[i])
        for each in reranked:
            close(each["relevance_score"], cosines[each["index"]])
        # SGLang's format: the likelihood of these tokens as the next one.
        fields = {"query": "ab", "items": ["c", "de"], "label_token_ids": [104, 7]}
        scored = (await post(port, "/v1/score", fields)).json
        generator = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for found, text in zip(scored["scores"], ("abc", "abde"), strict=True):
            with torch.no_grad():
                logits = generator(torch.tensor([ids(text)])).logits[0, -1]
            close(found, logits.softmax(dim=-1)[[104, 7]])
        stub = cluster._stub
        request = EmbedRequest(
            inputs=[Input(text=TEXTS[1]), Input(token_ids=TokenIds(ids=ids("x")))]
        )
        vectors = (await stub.Embed(request, timeout=60)).vectors
        for vector, expect in zip(vectors, expected[1:], strict=True):
            close(np.frombuffer(vector, "<f4"), expect)
        request = ScoreRequest(queries=[TEXTS[0]], documents=TEXTS)
        scores = (await stub.Score(request, timeout=60)).scores
        close(scores, torch.stack([expected[0] @ each for each in expected]))
