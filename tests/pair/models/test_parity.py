"""Architecture, page size, overlap, caches and pool: disaggregated tokens are those of
transformers, and sampled tokens are those of a colocated node."""

import random
from collections.abc import Iterator
from itertools import product

import pytest

from kvtransfer.messages import PagesReady
from tests.pair.conftest import Known
from tests.pair.rig import Loaded, PairRig, Size
from tests.support.models.checkpoints import (
    ARCHITECTURES,
    EXPERT_ARCHITECTURES,
    confirmed_tokens,
    greedy_tokens,
    reference_model,
)
from tests.support.models.tiny_models import make_tiny

NUM_TOKENS = 14
CHUNK_TOKENS = 64
NUM_GROWING = 6
QUICK_EXPERTS = ("qwen3_moe",)


def _prompts(vocabulary_size: int, page_size: int) -> list[list[int]]:
    """Return prompts of all relevant lengths. Some outgrow their page at the same time, and one
    shares its first page with the longest."""
    lengths = [1, page_size - 1, page_size, page_size + 1, 3 * CHUNK_TOKENS + 5]
    lengths += [page_size - 8] * NUM_GROWING
    source = random.Random(page_size)
    prompts = [[source.randrange(vocabulary_size) for _ in range(n)] for n in lengths]
    return [*prompts, [*prompts[4][:page_size], *prompts[3]]]


# Page size, overlap and small pool: every pair of values of two of them occurs in a row.
PAIRWISE = ((16, True, True), (64, False, True), (64, True, False), (16, False, False))
QUICK = dict(zip(("gemma2", "mistral", "qwen2", "qwen3"), PAIRWISE, strict=True))


def _crossed() -> Iterator:
    """Yield every architecture with every row. `make test` runs those of `QUICK`."""
    for architecture, row in product(ARCHITECTURES, PAIRWISE):
        page_size, overlap, small_pool = row
        quick = QUICK.get(architecture) == row
        name = f"{architecture}-{page_size}-{'overlap' if overlap else 'normal'}"
        yield pytest.param(
            architecture,
            page_size,
            overlap,
            small_pool,
            marks=[] if quick else [pytest.mark.long],
            id=f"{name}-{'small' if small_pool else 'large'}",
        )


@pytest.mark.parametrize("swap_pages", [0, 64], ids=["recomputed", "swapped"])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "top_p": 0.95}], ids=["greedy", "seeded"]
)
def test_injected_retractions_change_no_response(known, sampling, swap_pages):
    def answers(every: int) -> list[list[int]]:
        size = Size(64, swap_pages=swap_pages)
        with PairRig(known.loaded, decode=[size], retract_every=every) as rig:
            asked = [rig.ask([i] * 20, NUM_TOKENS, **sampling) for i in range(4)]
            rig.run()
            assert bool(rig.decode[0].count("retractions")) == bool(every)
        return [one.tokens for one in asked]

    undisturbed = answers(0)
    assert len({tuple(tokens) for tokens in undisturbed}) > 1
    assert answers(3) == undisturbed


def _sampled() -> Iterator:
    """Yield every architecture with and without overlap. `make test` runs two of them."""
    quick = {"qwen3": False, "gemma2": True}
    for architecture, overlap in product(ARCHITECTURES, (True, False)):
        marks = [] if quick.get(architecture) is overlap else [pytest.mark.long]
        name = f"{architecture}-{'overlap' if overlap else 'normal'}"
        yield pytest.param(architecture, overlap, marks=marks, id=name)


@pytest.mark.parametrize("architecture, page_size, overlap, small_pool", [*_crossed()])
def test_greedy_tokens_are_those_of_transformers(
    model, architecture, page_size, overlap, small_pool
):
    _check_greedy(model(architecture), page_size, overlap, small_pool)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in QUICK_EXPERTS else [pytest.mark.long])
        for name in EXPERT_ARCHITECTURES
    ],
)
def test_greedy_tokens_of_experts_are_those_of_transformers(model, architecture):
    """The experts of a token depend neither on its node nor on other requests of the batch."""
    _check_greedy(model(architecture), page_size=16, overlap=True, small_pool=True)


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_oss",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("deepseek_v3", "gemma3n_text")),
    ],
)
def test_greedy_tokens_of_classes_of_transformers_are_those_of_the_class_alone(tmp_path, kind):
    directory = make_tiny(tmp_path, kind)
    loaded = Loaded.from_directory(directory, backend="transformers")
    known = Known(loaded, reference_model(directory), {})
    _check_greedy(known, page_size=16, overlap=True, small_pool=True)


def _check_greedy(known: Known, page_size: int, overlap: bool, small_pool: bool) -> None:
    prompts = _prompts(known.vocabulary_size, page_size)
    expected = [known.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    least = known.tables(page_size).pages_to_compute(3 * CHUNK_TOKENS + 5 + NUM_TOKENS)
    num_pages = least if small_pool else 128
    with PairRig(
        known.loaded,
        prefill=[Size(max_running_requests=4)],
        decode=[Size(num_pages=num_pages, max_running_requests=16)],
        page_size=page_size,
        chunked_prefill_tokens=CHUNK_TOKENS,
        overlap_schedule=overlap,
        new_token_ratio=0.1,
    ) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        for cold in ((prefill, decode), (), (decode,), (prefill,)):
            rig.flush(*cold)
            asked = [rig.ask(prompt, NUM_TOKENS) for prompt in prompts]
            rig.run()
            assert [one.tokens for one in asked] == expected
        assert decode.count("handoffs_completed") == len(rig.asked)
        assert (decode.count("retractions") > 0) is small_pool


@pytest.mark.parametrize(
    "cold", ["", "prefill", "decode", "prefill decode"], ids=lambda cold: cold or "none"
)
def test_tokens_cached_on_either_side_are_neither_computed_nor_read_again(known, cold):
    prompt = list(range(100))  # 6 whole pages and a part
    with PairRig(known.loaded) as rig:
        (prefill,) = rig.prefill
        rig.ask(prompt)
        rig.flush(*(node for node in rig.nodes if node.front.address.split("-")[0] in cold))
        before = prefill.count("cached_tokens")
        rig.wires.seen.clear()
        asked = rig.serve(prompt)
        assert asked.tokens == known.greedy(prompt, 8)
        assert asked.cached_tokens == (0 if cold == "prefill decode" else 96)
        assert prefill.count("cached_tokens") - before == (0 if "prefill" in cold else 96)
        moved = sum(len(said.pages) for said in rig.wires.said(PagesReady))
        assert moved == (7 if "decode" in cold else 1)


@pytest.mark.parametrize("architecture, overlap", [*_sampled()])
def test_sampled_tokens_do_not_depend_on_where_the_prompt_was_computed(
    model, architecture, overlap
):
    known = model(architecture)
    prompts = _prompts(known.vocabulary_size, 16)
    ways = [
        {"temperature": 0.9},
        {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3},
        {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.6, "presence_penalty": 0.4},
        {"temperature": 1.0, "min_p": 0.05, "seed": 2**63 + 5},
        {"temperature": 0.0, "repetition_penalty": 1.5},
    ]

    def sampled(**options) -> list[list[int]]:
        with PairRig(known.loaded, overlap_schedule=overlap, **options) as rig:
            asked = [
                rig.ask(prompt, NUM_TOKENS, **{"seed": i, **ways[i % len(ways)]})
                for i, prompt in enumerate(prompts)
            ]
            rig.run()
        return [one.tokens for one in asked]

    colocated = sampled(prefill=(), mode="colocated")
    assert sampled() == colocated
    least = 16 * known.tables(16).num_tables
    with_retractions = sampled(decode=[Size(num_pages=least)], new_token_ratio=0.1)
    assert with_retractions == colocated
    assert colocated[0] != known.greedy(prompts[0], NUM_TOKENS)


@pytest.mark.parametrize("wrong", [(), (0,), (3, 4), (7,), range(8)], ids=str)
def test_tokens_are_those_of_transformers_with_any_drafts(known, wrong):
    asked = [5, 6, 7]
    (expected,) = greedy_tokens(known.reference, [asked], 8)
    guessed = [token + (place in wrong) for place, token in enumerate(expected)]
    assert confirmed_tokens(known.reference, asked, guessed) == expected
