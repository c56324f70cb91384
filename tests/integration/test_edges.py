"""Requests at the edges of what is allowed, and beyond them, through a router and two nodes.

After every test the module's fixture has all pages back: nothing of a refused request stays.
"""

import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from protos.router_pb2 import GenerateRequest, TokenIds
from protos.sampling_pb2 import Sampling
from tests.integration.oracle import Oracle
from tests.support.cluster import RIGS, Cluster, Rig
from tests.support.noise_model import SPECIAL_TOKENS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PAGE = 16
CHUNK = 64
NUM_PAGES = 64  # fewer tokens than the context has: a prompt can fit the one and not the other
CONTEXT = 8192
VOCABULARY = 256 + len(SPECIAL_TOKENS)
EOS = VOCABULARY - 1


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=RIGS)
async def cluster(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    rig: Rig = request.param
    async with Cluster(
        model,
        tmp_path_factory.mktemp("logs"),
        rig=rig,
        node_flags=(
            f"--engine.cache.page-size={PAGE}",
            f"--engine.cache.num-pages={NUM_PAGES}",
            f"--engine.scheduler.chunked-prefill-tokens={CHUNK}",
        ),
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _nothing_stays(cluster: Cluster) -> AsyncIterator[None]:
    yield
    await cluster.until_nothing_is_held()


def _prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(f"{length} {seed}")
    return [source.randrange(256) for _ in range(length)]


def _prompt_answered_by(known: Oracle, token: int) -> list[int]:
    """A prompt whose first greedy token is `token`."""
    prompts = (_prompt(3, seed) for seed in range(5000))
    return next(prompt for prompt in prompts if known.tokens(prompt, 1) == (token,))


@pytest.mark.parametrize("stops", [False, True])
async def test_an_event_has_as_many_tokens_as_are_asked_for(
    cluster: Cluster, known: Oracle, stops: bool
):
    """The first one has one, and a slow client gets several at once. A stop string ends the
    response at the same token as ever."""
    prompt = _prompt(40)
    sampling = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    plain = await cluster.generate(prompt, **sampling)
    if stops:
        sampling["stop"] = [plain.text[len(plain.text) // 2 :][:3]]
        plain = await cluster.generate(prompt, **sampling)
    request = GenerateRequest(
        token_ids=TokenIds(ids=prompt), sampling=Sampling(**sampling), stream_interval=7
    )
    answers = [answer async for answer in cluster.ask(request)]
    sizes = [len(answer.token_ids) for answer in answers]
    assert tuple(token for answer in answers for token in answer.token_ids) == plain.token_ids
    assert "".join(answer.text for answer in answers) == plain.text
    assert sizes[0] == 1 and not any(size % 7 for size in sizes[1:-1])
    assert answers[-1].finish_reason == plain.finish_reason == ("stop" if stops else "length")


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, CHUNK, CHUNK + 1, 300])
async def test_a_prompt_of_this_many_tokens(cluster: Cluster, known: Oracle, length: int):
    answer = await cluster.generate(_prompt(length), max_tokens=20, ignore_eos=True)
    assert answer.token_ids == known.tokens(_prompt(length), 20)
    assert answer.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, 20)


async def test_a_prompt_that_the_decode_node_has_whole_is_answered_from_there(
    cluster: Cluster, known: Oracle
):
    prompt = _prompt(4 * PAGE, seed=1)
    await cluster.generate(prompt, max_tokens=PAGE, ignore_eos=True)
    await cluster.until_nothing_is_held()
    await cluster.prefill[0].flush_cache()
    before = (await cluster.decode[0].describe()).counters
    answer = await cluster.generate(prompt, max_tokens=20, ignore_eos=True)
    assert answer.token_ids == known.tokens(prompt, 20)
    assert answer.usage.cached_tokens == len(prompt)
    after = (await cluster.decode[0].describe()).counters
    assert after["handoffs_completed"] == before["handoffs_completed"] + 1
    assert after["pages_read"] == before["pages_read"]


async def test_max_tokens_of_one_is_the_first_token_alone(cluster: Cluster, known: Oracle):
    prompt = _prompt(2 * PAGE + 3, seed=2)
    answer = await cluster.generate(prompt, max_tokens=1, ignore_eos=True)
    assert answer.token_ids == known.tokens(prompt, 1)
    assert answer.finish_reason == "length"


async def test_a_first_token_that_is_the_end_ends_the_request(cluster: Cluster, known: Oracle):
    prompt = _prompt_answered_by(known, EOS)
    answer = await cluster.generate(prompt, max_tokens=20)
    assert answer.token_ids == (EOS,)
    assert (answer.text, answer.finish_reason) == ("", "stop")


async def test_a_first_token_that_is_a_stop_token_ends_the_request(cluster: Cluster, known: Oracle):
    prompt = _prompt(PAGE, seed=3)
    (first,) = known.tokens(prompt, 1)
    answer = await cluster.generate(prompt, max_tokens=20, stop_token_ids=[first])
    assert answer.token_ids == (first,)
    assert answer.finish_reason == "stop"


async def test_a_stop_string_that_is_the_first_token_ends_the_request(
    cluster: Cluster, known: Oracle
):
    prompt = _prompt(2 * PAGE + 1, seed=4)
    text = (await cluster.generate(prompt, max_tokens=1, ignore_eos=True)).text
    answer = await cluster.generate(prompt, max_tokens=20, stop=[text])
    assert (answer.text, answer.finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1
    assert answer.usage.cached_tokens == 2 * PAGE


async def test_a_stop_string_across_tokens_is_cut_from_the_text(cluster: Cluster):
    prompt = _prompt(PAGE, seed=5)
    whole = (await cluster.generate(prompt, max_tokens=20, ignore_eos=True)).text
    stop = whole[8:11]
    answer = await cluster.generate(prompt, max_tokens=20, ignore_eos=True, stop=[stop])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


async def test_an_answer_ends_where_the_pool_or_the_context_ends(cluster: Cluster):
    prompt = _prompt(PAGE * NUM_PAGES - 40, seed=6)
    answer = await cluster.generate(prompt, max_tokens=5000, ignore_eos=True)
    assert 1 <= answer.usage.completion_tokens <= 41
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    "prompt, fields, words",
    [
        (_prompt(CONTEXT + 1), {}, ("token_ids", str(CONTEXT))),
        (_prompt(PAGE * NUM_PAGES + 1), {}, ("token_ids",)),  # it can never fit the pool
        ([], {}, ("token_ids",)),
        ("", {}, ("text",)),
        ([1, VOCABULARY], {}, ("token_ids",)),
        ([1, 2, 3], {"temperature": float("nan")}, ("sampling.temperature",)),
        ([1, 2, 3], {"stop_token_ids": list(range(17))}, ("sampling.stop_token_ids",)),
    ],
    ids=["context", "pool", "empty", "empty text", "vocabulary", "number", "list"],
)
async def test_what_cannot_be_is_refused_by_name(
    cluster: Cluster, prompt: str | list[int], fields: dict[str, Any], words: tuple[str, ...]
):
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await cluster.generate(prompt, **{"max_tokens": 1, **fields})
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT, refusal.value.details()
    assert all(word in (refusal.value.details() or "") for word in words)


async def test_the_id_of_a_live_request_may_come_again(cluster: Cluster):
    first = cluster.stream([1, 2, 3], request_id="mine", max_tokens=200, ignore_eos=True)
    begun = await anext(first)
    async with aclosing(cluster.stream([1], request_id="mine", max_tokens=1)) as second:
        ids = {response.request_id async for response in second}
    assert len(ids | {begun.request_id, "mine"}) == 3
    await first.aclose()
