"""Greedy tokens through real processes are those of transformers, token by token.

There is one cluster per architecture. Data path, page size, overlap and the decode pool's size vary
pairwise: every pair of values of two of these occurs in some cluster. With overlap and a large
pool, decode nodes use speculative decoding. `make test` starts one of the clusters, and the long
tests start the others. More combinations run in one process over loopback:
tests/pair/models/test_parity.py.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from common.page_tables import PageTables
from engine.kv_cache.layout import KVLayout
from engine.models.families import read_decoder
from tests.integration.oracle import Oracle, oracle
from tests.support.models.checkpoints import ARCHITECTURES, make_checkpoint
from tests.support.processes.cluster import RIGS, Cluster, Rig

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CHUNK_TOKENS = 64
NUM_TOKENS = 16
GROWTH = 130  # tokens: more pages than were reserved for it
ROUNDS = 20  # whether requests share the pool at the same time depends on other load of the machine
NUM_CONCURRENT = 64
POOL_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Axes:
    architecture: str
    path: str
    page_size: int
    overlap: bool
    small_pool: bool  # decode nodes must retract running requests

    @property
    def guesses(self) -> bool:
        """Return whether decode nodes use speculative decoding."""
        return self.overlap and not self.small_pool

    def __str__(self) -> str:
        pool = "small" if self.small_pool else "large"
        loop = "overlap" if self.overlap else "normal"
        return f"{self.architecture}-{self.path}-page{self.page_size}-{loop}-{pool}"


# The smallest set of rows for four axes with two values, with every pair of values of two axes.
PAIRWISE = ((0, 0, 0, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0))


def _axes(architecture: str, path: int, page_size: int, overlap: int, small_pool: int) -> Axes:
    return Axes(
        architecture, ("nixl", "tcp")[path], (16, 64)[page_size], bool(overlap), bool(small_pool)
    )


QUICK = 1  # the pairwise row that `make test` runs
LONG = [pytest.mark.long]
CASES = [
    (_axes(architecture, *row), [] if number == QUICK else LONG)
    for number, (architecture, row) in enumerate(zip(ARCHITECTURES, PAIRWISE, strict=True))
]


@dataclass(frozen=True, slots=True)
class System:
    axes: Axes
    cluster: Cluster
    oracle: Oracle
    prompts: list[list[int]]  # of all relevant lengths

    def check(
        self, prompt: list[int], tokens: tuple[int, ...], num_tokens: int = NUM_TOKENS
    ) -> None:
        self.oracle.check(prompt, tokens, num_tokens)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param((axes, *rig.values), id=f"{axes}-{rig.id}", marks=[*rig.marks, *marks])
        for axes, marks in CASES
        for rig in RIGS
    ],
)
async def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[System]:
    axes: Axes
    rig: Rig
    axes, rig = request.param
    model = _checkpoint(axes.architecture, tmp_path_factory)
    page = axes.page_size
    lengths = _lengths(page)
    # A small pool: the longest prompt and its response fit, with little free space.
    num_decode_tokens = max(lengths) + 2 * page if axes.small_pool else POOL_TOKENS
    num_decode_pages = _tables(model, page).pages_to_compute(num_decode_tokens)
    num_nodes = 2 if axes.path == "nixl" and axes.overlap else 1
    async with Cluster(
        model,
        tmp_path_factory.mktemp("logs"),
        rig=rig,
        path=axes.path,
        num_prefill=num_nodes,
        num_decode=num_nodes,
        router_flags=("--policy=round_robin",),  # every pair of nodes gets every prompt
        node_flags=(
            f"--engine.cache.page-size={page}",
            f"--engine.scheduler.chunked-prefill-tokens={CHUNK_TOKENS}",
            f"--{'' if axes.overlap else 'no-'}engine.scheduler.overlap-schedule",
            # Little is reserved for growth, so a small pool runs out during decoding.
            "--engine.scheduler.new-token-ratio=0.1",
        ),
        prefill_flags=(f"--engine.cache.num-pages={POOL_TOKENS // page}",),
        decode_flags=(
            f"--engine.cache.num-pages={num_decode_pages}",
            f"--engine.speculative.method={'ngram' if axes.guesses else 'none'}",
            "--engine.speculative.prompt-lookup-min=1",
            "--no-engine.speculative.adaptive",
        ),
    ) as cluster:
        known = oracle(model)
        yield System(axes, cluster, known, _prompts(lengths, known.vocabulary_size))


def _tables(model: Path, page_size: int) -> PageTables:
    """Return the page tables of each request. There are several if only some layers have a
    window."""
    return KVLayout.of(read_decoder(model).model.layers, page_size, torch.float32).tables


def _checkpoint(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.getbasetemp() / architecture
    return directory if directory.exists() else make_checkpoint(directory, architecture)


def _lengths(page_size: int) -> list[int]:
    return [1, page_size - 1, page_size, page_size + 1, 2 * page_size, 4 * CHUNK_TOKENS + 5]


def _prompts(lengths: list[int], vocabulary_size: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(vocabulary_size) for _ in range(length)] for length in lengths]


async def _cold(system: System, *roles: str) -> None:
    """Empty the prefix caches of the nodes of these roles."""
    await system.cluster.until_nothing_is_held()
    for role in roles:
        for node in getattr(system.cluster, role):
            await node.flush_cache()


@pytest.mark.parametrize(
    "cold",
    [("prefill", "decode"), (), ("decode",), ("prefill",)],
    ids=lambda c: "+".join(c) or "none",
)
async def test_prompts_of_every_length_with_these_caches_cold(
    system: System, cold: tuple[str, ...]
):
    small_pool = system.axes.small_pool  # of the decode nodes: it keeps few prefixes
    for prompt in system.prompts:  # both pairs of nodes get each prompt
        for _ in range(2):
            system.check(prompt, (await _ask(system, prompt)).token_ids)
    await _cold(system, *cold)
    for prompt in system.prompts:
        answer = await _ask(system, prompt)
        system.check(prompt, answer.token_ids)
        if len(cold) == 2:
            assert answer.usage.cached_tokens == 0
        elif len(prompt) > system.axes.page_size and not ("prefill" in cold and small_pool):
            assert answer.usage.cached_tokens >= system.axes.page_size


async def _ask(system: System, prompt: list[int], num_tokens: int = NUM_TOKENS):
    return await system.cluster.generate(prompt, max_tokens=num_tokens, ignore_eos=True)


async def test_64_requests_at_once(system: System):
    await _cold(system, "prefill", "decode")
    source = random.Random(1)
    asked = [
        (source.choice(system.prompts), source.randint(1, NUM_TOKENS))
        for _ in range(NUM_CONCURRENT)
    ]
    answers = await asyncio.gather(*(_ask(system, *question) for question in asked))
    for (prompt, num_tokens), answer in zip(asked, answers, strict=True):
        system.check(prompt, answer.token_ids, num_tokens)
        assert answer.finish_reason == "length"


async def test_requests_outgrow_the_pool_together(system: System):
    """Each of them fits. With a small pool some are retracted and return."""
    source = random.Random(2)
    length = system.axes.page_size - 1
    prompts = [
        [source.randrange(system.oracle.vocabulary_size) for _ in range(length)]
        for _ in range(4 * len(system.cluster.decode))
    ]
    for _ in range(ROUNDS):
        answers = await asyncio.gather(*(_ask(system, prompt, GROWTH) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            system.oracle.check(prompt, answer.token_ids, GROWTH)
        if not system.axes.small_pool or await _total(system, "retractions"):
            return
    raise AssertionError(f"nobody had to leave the device in {ROUNDS} rounds")


async def _total(system: System, counter: str) -> int:
    descriptions = [await node.describe() for node in system.cluster.decode]
    return sum(description.counters[counter] for description in descriptions)
