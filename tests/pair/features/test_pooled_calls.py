"""Pooling calls at a prefill node that also has hand-offs: results, ends, rejections."""

import time

import numpy as np
import pytest
import torch
from grpc import StatusCode
from transformers import AutoModel

from common.requests.pooling import PoolingMode, PoolingParams
from engine.scheduler.scheduler import DEADLINE_CHECK_S
from node.messages import AbortRequests, CancelPooling, DrainNode, PoolingDone, SubmitPooling
from tests.pair.rig import Node, PairRig, Size
from tests.support.models.checkpoints import VOCABULARY_SIZE

LAST = PoolingParams(PoolingMode.LAST)
PROMPTS = [list(range(1, 1 + length)) for length in (1, 40, 130)]


@pytest.fixture(scope="module")
def decoder(known):
    return AutoModel.from_pretrained(known.loaded.directory, dtype=torch.float32)


def last_state(model, prompt) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0, -1]


def call(node: Node, number: int, prompts, **fields) -> None:
    fields = {"pooling": LAST, "budget_s": 300.0, "request_id": f"call {number}", **fields}
    token_ids = tuple(np.array(prompt, "<i4").tobytes() for prompt in prompts)
    node.router.inbox.append(SubmitPooling(number=number, prompts=token_ids, **fields))


def answered(rig: PairRig, node: Node, count: int = 1) -> list[PoolingDone]:
    rig.until(lambda: len(node.router.pooled) == count, f"{count} answers")
    return node.router.pooled


def refusal(rig: PairRig, node: Node) -> tuple[int, str]:
    (pooled,) = answered(rig, node)
    assert not pooled.vectors
    return pooled.error_code, pooled.error


def code(status: StatusCode) -> int:
    return int(status.value[0])


def test_prompts_of_calls_are_pooled_beside_hand_offs(known, decoder):
    with PairRig(known.loaded) as rig:
        (node,) = rig.prefill
        asked = [rig.ask(prompt, 6) for prompt in PROMPTS]
        call(node, 1, PROMPTS)
        call(node, 2, PROMPTS[::-1])
        rig.until(lambda: all(each.ended for each in asked), "all answers")
        reported = {pooled.number: pooled for pooled in answered(rig, node, 2)}
        for number, prompts in ((1, PROMPTS), (2, PROMPTS[::-1])):
            for vector, prompt in zip(reported[number].vectors, prompts, strict=True):
                found = torch.from_numpy(np.frombuffer(vector, "<f4").copy())
                torch.testing.assert_close(found, last_state(decoder, prompt), atol=1e-4, rtol=1e-4)
        known.check(*asked)
        assert node.count("pooled_prompts") == 6


def test_an_abandoned_call_leaves_no_resources(known):
    with PairRig(known.loaded, chunked_prefill_tokens=16) as rig:
        (node,) = rig.prefill
        call(node, 1, PROMPTS)
        rig.until(lambda: node.queue("chunked"), "a prompt between its chunks")
        node.router.inbox.append(CancelPooling(1))
        call(node, 2, PROMPTS[:1])
        (pooled,) = answered(rig, node)
        assert pooled.number == 2


def test_an_operator_aborts_a_call_by_its_id(known):
    with PairRig(known.loaded, chunked_prefill_tokens=16) as rig:
        (node,) = rig.prefill
        call(node, 1, PROMPTS)
        rig.until(lambda: node.queue("chunked"), "a prompt between its chunks")
        rig.command(node, AbortRequests("call 1"))
        assert refusal(rig, node) == (code(StatusCode.CANCELLED), "aborted by an operator")


def test_a_call_ends_at_its_deadline(known):
    with PairRig(known.loaded, chunked_prefill_tokens=16) as rig:
        (node,) = rig.prefill
        call(node, 1, PROMPTS, budget_s=1e-6)
        rig.turn(node)
        rig.let_time_pass(time.monotonic() + DEADLINE_CHECK_S)
        status, sentence = refusal(rig, node)
        assert status == code(StatusCode.DEADLINE_EXCEEDED)
        assert "budget" in sentence


@pytest.mark.parametrize(
    "prompts, pooling, said",
    [
        ([[1], []], LAST, "the prompt is empty"),
        ([[1], [VOCABULARY_SIZE]], LAST, "outside the vocabulary"),
        ([[1], [-1]], LAST, "-1 is outside the vocabulary"),
        ([[1], [1] * 512], LAST, "no room in a context"),
        ([[1]], PoolingParams(PoolingMode.LABELS), "no classification head"),
    ],
)
def test_a_call_with_one_invalid_prompt_is_rejected_as_a_whole(known, prompts, pooling, said):
    with PairRig(known.loaded) as rig:
        (node,) = rig.prefill
        call(node, 1, prompts, pooling=pooling)
        status, sentence = refusal(rig, node)
        assert status == code(StatusCode.INVALID_ARGUMENT)
        assert said in sentence
        assert node.count("finished") == 0


def test_calls_over_the_queue_limit_are_rejected_but_never_a_single_one(known):
    with PairRig(known.loaded, prefill=[Size(max_queued_requests=4)]) as rig:
        (node,) = rig.prefill
        # Both arrive before the first has started.
        call(node, 1, [[token] for token in range(1, 9)])
        call(node, 2, [[9]])
        reported = {pooled.number: pooled for pooled in answered(rig, node, 2)}
        assert len(reported[1].vectors) == 8
        assert reported[2].error_code == code(StatusCode.RESOURCE_EXHAUSTED)


def test_a_draining_node_completes_its_calls_and_accepts_no_more(known):
    with PairRig(known.loaded, chunked_prefill_tokens=16) as rig:
        (node,) = rig.prefill
        call(node, 1, PROMPTS)
        rig.until(lambda: node.queue("chunked"), "a prompt between its chunks")
        rig.command(node, DrainNode())
        rig.until(lambda: node.control.draining, "it drains")
        call(node, 2, PROMPTS)
        reported = {pooled.number: pooled for pooled in answered(rig, node, 2)}
        assert len(reported[1].vectors) == 3
        assert reported[2].error_code == code(StatusCode.UNAVAILABLE)
        rig.until(lambda: node.router.drained, "drained")
