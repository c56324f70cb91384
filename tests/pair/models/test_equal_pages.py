"""Pages of the same tokens have the same bytes, whichever steps and nodes have computed them."""

from dataclasses import replace

import pytest
import torch

from engine.kv_cache.states import RecurrentState
from engine.models import load
from tests.pair.rig import Loaded, PairRig, Size, prompt
from tests.support.hardware.devices import CPU, need_invariant_products, use
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.drafters import recall, speculator

PAGE_SIZE = 16
PROMPT = prompt(3 * PAGE_SIZE + 5, 3)
NUM_TOKENS = 2 * PAGE_SIZE + 12  # their keys and values fill pages, as the last token has none
LONG = pytest.mark.long


def pages_of(node) -> set[bytes]:
    """Return the bytes of all pages of a node."""
    return {page.numpy().tobytes() for page in node.engine.pool.tensor}


def made(loaded: Loaded, text: list[int], num_tokens: int, size: Size, **options):
    """Return the tokens of a response, and the pages of each decode node afterwards."""
    neighbours, before = options.pop("neighbours", 0), options.pop("before", ())
    with PairRig(loaded, decode=[size], page_size=PAGE_SIZE, **options) as rig:
        others = [rig.ask(prompt(20 + i, 7 + i), num_tokens) for i in range(neighbours)]
        if before:
            rig.serve(before, 1)
        asked = rig.ask(text, num_tokens)
        rig.run(asked, *others)
        assert bool(asked.cached_tokens) == bool(before)
        return asked.tokens, pages_of(rig.decode[0])


@pytest.mark.parametrize(
    "family, dtype, kv_dtype",
    [
        ("qwen3", "float32", "auto"),
        pytest.param("gemma2", "bfloat16", "auto", marks=LONG),
        pytest.param("qwen3_moe", "float32", "auto", marks=LONG),
        pytest.param("qwen2_moe", "bfloat16", "auto", marks=LONG),
        pytest.param("gpt_oss", "bfloat16", "auto", marks=LONG),
        pytest.param("deepseek_v3", "float32", "auto", marks=LONG),
        pytest.param("qwen3_next", "float32", "auto", marks=LONG),
        ("qwen3_5_text", "bfloat16", "auto"),
        pytest.param("qwen3_5_moe_text", "bfloat16", "fp8_e4m3", marks=LONG),
        pytest.param("qwen3", "bfloat16", "fp8_e4m3", marks=LONG),
        pytest.param("gpt_oss", "float32", "fp8_e5m2", marks=LONG),
        pytest.param("deepseek_v2", "bfloat16", "fp8_e4m3", marks=LONG),
    ],
)
def test_pages_of_the_same_tokens_are_equal(tmp_path, monkeypatch, family, dtype, kv_dtype):
    """Compares keys and values of all tokens, and the state after the last one."""
    use("compiled", monkeypatch)
    need_invariant_products(getattr(torch, dtype))
    directory = make_checkpoint(tmp_path, family)
    model = load(directory, CPU, getattr(torch, dtype))
    model.compute_in_one_way()
    # A prefix cache keeps pages that have left a window, and copies of earlier states.
    has_states = any(isinstance(each, RecurrentState) for each in model.spec.layers)
    size = Size(num_pages=128, kv_dtype=kv_dtype, prefix_cache=not has_states)
    loaded = Loaded(directory, model)
    alone = {"prefill": (), "chunked_prefill_tokens": 512}
    tokens, by_decode = made(loaded, PROMPT, NUM_TOKENS, size, **alone)
    text = [*PROMPT, *tokens]
    _, by_prompt = made(loaded, text[:-1], 1, size, **alone)
    # A state does not fill its pages. The rest of a page has its initial bytes or those of an
    # earlier use.
    expected = {page.rstrip(b"\xff") for page in by_prompt} - {b""}
    assert len(expected) >= len(text[:-1]) // PAGE_SIZE
    cached = replace(size, prefix_cache=True)
    drafts = speculator("right", recall([[*text, 1, 1, 1]]), model.spec.vocabulary_size, 4)
    ways = {
        "decode": by_decode,
        "chunks": made(loaded, text[:-1], 1, size, prefill=(), chunked_prefill_tokens=16)[1],
        "a batch": made(loaded, PROMPT, NUM_TOKENS, size, **alone, neighbours=3)[1],
        "a hand-off": made(loaded, PROMPT, NUM_TOKENS, size, prefill=[size])[1],
        "drafts": made(loaded, PROMPT, NUM_TOKENS, replace(size, speculator=drafts), **alone)[1],
        "a cached prefix": made(loaded, text[:-1], 1, cached, **alone, before=PROMPT)[1],
    }
    for way, pages in ways.items():
        missing = [own for own in expected if not any(page.startswith(own) for page in pages)]
        assert not missing, f"{way}: {len(missing)} of {len(expected)} differ"
