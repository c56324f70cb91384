"""Models computed by classes of transformers, through a pair of nodes. Chunks, hand-offs, caches
and retraction work as for native models."""

import random

import pytest

from engine.kv_cache.layout import KVLayout
from tests.pair.rig import Loaded, PairRig, Size
from tests.support.models.checkpoints import greedy_tokens, reference_model
from tests.support.models.tiny_models import VOCABULARY_SIZE, make_tiny

NUM_TOKENS = 14
CHUNK_TOKENS = 64


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("deepseek_v3", "gemma3n_text")]


@pytest.mark.parametrize("kind", ["gpt_oss", *LONG])
def test_greedy_tokens_through_a_pair_are_those_of_transformers(tmp_path, kind):
    """With and without cached prefixes on either side, in a pool that is too small for all
    requests together."""
    directory = make_tiny(tmp_path, kind)
    loaded = Loaded.from_directory(directory, backend="transformers")
    model = loaded.model
    source = random.Random(kind)
    lengths = [1, 15, 16, 17, 3 * CHUNK_TOKENS + 5, *[8] * 6]
    prompts = [source.choices(range(2, VOCABULARY_SIZE - 64), k=length) for length in lengths]
    expected = greedy_tokens(reference_model(directory), prompts, NUM_TOKENS)
    tables = KVLayout.of(model.spec.layers, 16, model.dtype).tables
    num_pages = tables.pages_to_compute(3 * CHUNK_TOKENS + 5 + NUM_TOKENS)
    with PairRig(
        loaded,
        prefill=[Size(max_running_requests=4)],
        decode=[Size(num_pages=num_pages, max_running_requests=16)],
        chunked_prefill_tokens=CHUNK_TOKENS,
        new_token_ratio=0.1,
    ) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        for cold in ((prefill, decode), (), (decode,)):
            rig.flush(*cold)
            asked = [rig.ask(prompt, NUM_TOKENS) for prompt in prompts]
            rig.run()
            assert [one.tokens for one in asked] == expected
        assert decode.count("handoffs_completed") == len(rig.asked)
        assert decode.count("retractions") > 0
