"""Input embeddings across a hand-off. Tokens are those of transformers for the same inputs,
whichever node computes them, and KV is shared only by content."""

import numpy as np
import pytest
import torch

from common.config import EngineConfig
from common.errors import ConfigError, InvalidRequest
from common.request import GIVEN_TOKEN, InputEmbeddings, from_proto, to_fields
from engine.load import check_features
from node import request_state
from protos import request_pb2 as pb
from tests.pair.cache.test_prefill_ahead import _Grants
from tests.pair.rig import PairRig, Size
from tests.support.specs import make_spec

NUM_TOKENS = 10
LENGTHS = (1, 15, 65, 150)


class Given:
    """A prompt of embeddings that no token id has, and the tokens that transformers generates
    after it."""

    def __init__(self, known, length, seed=0):
        table = known.reference.get_input_embeddings().weight.detach()
        torch.manual_seed(1000 * seed + length)
        ids = torch.randint(0, known.vocabulary_size, (length,))
        self.rows = table[ids] + 0.5 * table.std() * torch.randn(length, table.shape[1])
        self.prompt = [GIVEN_TOKEN] * length
        self.embeddings = given(self.rows)
        self._reference = known.reference

    def greedy(self, num_tokens=NUM_TOKENS):
        rows = self.rows[None]
        with torch.inference_mode():
            tokens = self._reference.generate(
                inputs_embeds=rows,
                attention_mask=torch.ones(rows.shape[:2]),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return tokens[0].tolist()


def given(rows):
    return InputEmbeddings.of(rows.float().numpy().tobytes(), len(rows))


def ask(rig, one, num_tokens=NUM_TOKENS, **options):
    return rig.ask(one.prompt, num_tokens, input_embeddings=one.embeddings, **options)


def rig_of(known, **options):
    size = Size(input_embeddings=True)
    return PairRig(known.loaded, **{"prefill": [size], "decode": [size], **options})


@pytest.mark.parametrize(
    "pool", ["large", "small", pytest.param("colocated", marks=pytest.mark.long)]
)
def test_tokens_are_those_of_transformers(known, pool):
    """In chunks, after retractions, beside other requests, and for prompts in the caches."""
    asking = [Given(known, length) for length in LENGTHS]
    decode = Size(num_pages=12 if pool == "small" else 64, input_embeddings=True)
    alone = {"mode": "colocated", "prefill": ()} if pool == "colocated" else {}
    with rig_of(known, decode=[decode], new_token_ratio=0.1, **alone) as rig:
        for _ in range(2):
            asked = [ask(rig, one) for one in asking]
            plain = rig.serve(range(40), NUM_TOKENS)
            assert plain.tokens == known.greedy(range(40), NUM_TOKENS)
            assert [one.tokens for one in asked] == [one.greedy() for one in asking]
        assert rig.decode[0].count("handoffs_failed") == 0
        if pool == "large":
            assert asked[-1].cached_tokens == 144  # of 150, in pages of 16


def test_other_embeddings_and_other_namespaces_share_no_kv(known):
    one, other = (Given(known, 65, seed) for seed in range(2))
    with rig_of(known) as rig:
        for each, namespace, cached in (
            (one, b"", 0),
            (other, b"", 0),
            (one, b"n" * 16, 0),
            (one, b"", 64),
        ):
            asked = ask(rig, each, namespace=namespace)
            rig.run()
            assert asked.tokens == each.greedy()
            assert asked.cached_tokens == cached


def test_a_prompt_computed_again_has_its_embeddings(known):
    asking = [Given(known, length) for length in LENGTHS]
    size = Size(swap_pages=0, prefix_cache=False, input_embeddings=True)
    with rig_of(known, prefill=(), decode=[size], mode="colocated", retract_every=3) as rig:
        asked = [ask(rig, one) for one in asking]
        rig.run()
        assert rig.decode[0].count("recomputed") >= 1
        assert [one.tokens for one in asked] == [one.greedy() for one in asking]


def test_a_request_migrates_and_is_replayed_with_its_embeddings(known):
    one, size = Given(known, 40), Size(input_embeddings=True)
    with rig_of(known, decode=[size, size], migrates=True) as rig:
        asked = ask(rig, one, 40)
        assert rig.moved_midway(asked) == one.greedy(40)
        replayed = ask(rig, one, NUM_TOKENS, generated=one.greedy()[:6])
        rig.run()
        assert replayed.tokens == one.greedy()[6:]


def test_a_replayed_prompt_is_computed_ahead_with_its_embeddings(known, monkeypatch):
    one, grants = Given(known, 150), _Grants(monkeypatch)
    with rig_of(known) as rig:
        replayed = ask(rig, one, generated=one.greedy()[:6])
        (node,) = rig.prefill
        rig.until(lambda: node.queue("bootstrap"), "it waits for its Grant")
        rig.until(lambda: node.count("tokens_ahead") >= 100, "it is computed ahead", node)
        grants.release()
        rig.run()
        assert replayed.tokens == one.greedy()[6:]


def test_a_node_holds_the_embeddings_of_few_requests_at_a_time(known, monkeypatch):
    one = Given(known, 40)
    monkeypatch.setattr(request_state, "MAX_HELD_EMBEDDING_BYTES", 2 * len(one.embeddings.values))
    with rig_of(known) as rig:
        asked = [ask(rig, one) for _ in range(3)]
        rig.run()
        assert "bytes of input embeddings" in asked[2].ended.error
        assert [each.tokens for each in asked] == [one.greedy(), one.greedy(), []]


def test_unsupported_embeddings_are_rejected_with_a_reason(known):
    one, table = Given(known, 12), known.reference.get_input_embeddings().weight.detach()
    wide, odd, large = (Given(known, 12) for _ in range(3))
    wide.embeddings = given(torch.cat((one.rows, one.rows), dim=1))
    odd.embeddings = given(one.rows.index_fill(0, torch.tensor([3]), torch.nan))
    large.embeddings = given(one.rows.index_fill(0, torch.tensor([3]), -1e6))
    with rig_of(known) as rig:
        for wrong, options, error in (
            (wide, {}, f"rows of {2 * table.shape[1]} numbers"),
            (odd, {}, "input_embeddings: a number is not in [-65504, 65504]"),
            (large, {}, "input_embeddings: a number is not in"),
            (one, {"prompt_logprobs": 0}, "sampling.prompt_logprobs: not supported with input"),
        ):
            refused = ask(rig, wrong, **options)
            rig.run()
            assert error in refused.ended.error and not refused.tokens
        unknown = rig.serve([GIVEN_TOKEN] * 12, NUM_TOKENS)
        assert "outside the vocabulary" in unknown.ended.error
    with PairRig(known.loaded) as rig:
        refused = ask(rig, one)
        rig.run()
        assert "engine.input_embeddings.enabled" in refused.ended.error and not refused.tokens


@pytest.mark.parametrize(
    "values, prompt, error",
    [
        (bytes(4 * 6), [GIVEN_TOKEN] * 4, r"24 bytes are not float32 \[4, hidden size\]"),
        (
            bytes(4 * 8),
            [GIVEN_TOKEN, 1, GIVEN_TOKEN, GIVEN_TOKEN],
            "cannot be combined with token ids",
        ),
        (bytes((4 << 20) + 16), [GIVEN_TOKEN] * 4, "4194304 allowed"),
    ],
)
def test_nodes_refuse_embeddings_that_do_not_fit_their_prompt(values, prompt, error):
    proto = pb.Request(**to_fields(make_spec(prompt)))
    proto.input_embeddings = values
    with pytest.raises(InvalidRequest, match=error):
        from_proto(proto)


MTP, SPLIT = {"speculative": {"method": "mtp"}}, {"scheduler": {"split_prefill_ms": 20}}


# Also of routed experts, for test_returned_rows.py.
@pytest.mark.parametrize(
    "feature, settings, backend, named",
    [
        ("input_embeddings", MTP, "native", "speculative.method: mtp"),
        ("input_embeddings", {}, "transformers", "model_backend: transformers"),
        ("routed_experts", SPLIT, "native", "scheduler.split_prefill_ms: 20"),
        ("routed_experts", {}, "transformers", "model_backend: transformers"),
    ],
)
def test_a_model_without_support_for_a_feature_is_refused_at_start(
    feature, settings, backend, named
):
    config = EngineConfig.model_validate({"model": "m", feature: {"enabled": True}, **settings})
    expected = f"^engine.{named} is not supported with engine.{feature}"
    with pytest.raises(ConfigError, match=expected):
        check_features(config, backend)


def test_equal_values_have_equal_names():
    values = np.arange(8, dtype=np.float32).tobytes()
    assert InputEmbeddings.of(values, 2).name == InputEmbeddings.of(values, 2).name
    assert InputEmbeddings.of(values, 2).name != InputEmbeddings.of(values[::-1], 2).name
