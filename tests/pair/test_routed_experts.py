"""Routed experts across a hand-off: those of the prompt come from the prefill node, the others from
the decode node, and each position has exactly one row."""

import random

import numpy as np
import pytest
import torch

from common.config import EngineConfig, RoutedExpertsConfig
from common.errors import ConfigError
from engine.build import build
from engine.load import check_routed_experts
from kvtransfer.pairs import codec
from tests.pair.rig import Loaded, PairRig, Size
from tests.pair.test_speculation import _guessing
from tests.support.checkpoints import make_checkpoint, reference_model

NUM_TOKENS = 10
LENGTHS = (1, 15, 64, 150)
SMALL = {"new_token_ratio": 0.1, "min_new_token_ratio": 0.1}
WANTED = {"routed_experts": True, "logprobs": 0, "prompt_logprobs": 0}
RETURNED = RoutedExpertsConfig(enabled=True)


@pytest.fixture(scope="module")
def known(model):
    return model("qwen3_moe")


def prompts(vocabulary_size):
    source = random.Random(5)
    return [[source.randrange(vocabulary_size) for _ in range(length)] for length in LENGTHS]


def pair(known, decode=None, **settings):
    """Nodes with their own models, because a model records the experts of one forward."""
    settings.setdefault("prefill", [Size(routed_experts=RETURNED)])
    decode = decode or [Size(routed_experts=RETURNED)]
    return PairRig(known.loaded, decode=decode, own_models=True, **settings)


def reference(model, tokens, k):
    """Return the experts of transformers' routers, sorted, [tokens, layers, k]."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    ids = torch.stack([layer.topk(k, -1).indices for layer in logits], dim=1)
    return ids.sort(-1).values.numpy()


def check(known, one, first=1, logprobs=None):
    """`first`: index of the first prompt token with a log-probability. The experts of the token
    before it are the first ones."""
    config = known.reference.config
    expected = reference(known.reference, [*one.prompt, *one.tokens], config.num_experts_per_tok)
    rows = [each.experts for each in [*one.prompt_logprobs, *(logprobs or one.logprobs)]]
    found = np.frombuffer(b"".join(rows), np.int16).reshape(-1, *expected.shape[1:])
    assert np.array_equal(np.sort(found, -1), expected[first - 1 : -1])


@pytest.mark.parametrize(
    "pool", ["large", "small", pytest.param("colocated", marks=pytest.mark.long)]
)
def test_experts_are_those_of_transformers(known, pool):
    """In chunks, after retractions, beside other requests, and for prompts in the caches."""
    asking = prompts(known.vocabulary_size)
    size = Size(num_pages=12 if pool == "small" else 64, routed_experts=RETURNED)
    alone = {"mode": "colocated", "prefill": ()} if pool == "colocated" else {}
    with pair(known, [size], **SMALL, **alone) as rig:
        for _ in range(2):
            asked = [rig.ask(prompt, NUM_TOKENS, **WANTED) for prompt in asking]
            other = rig.serve(asking[1], NUM_TOKENS, logprobs=1, prompt_logprobs=1)
            found = [*other.logprobs, *other.prompt_logprobs]
            assert found and not any(each.experts for each in found)
            for one in asked:
                assert one.tokens == known.greedy(one.prompt, NUM_TOKENS)
                check(known, one)


def test_experts_are_sent_once_each_when_the_prompt_is_recomputed(known):
    alone = {"prefill": (), "mode": "colocated"}
    with pair(
        known, [Size(swap_pages=0, routed_experts=RETURNED)], **alone, retract_every=3
    ) as rig:
        asked = [
            rig.ask(prompt, NUM_TOKENS, prompt_logprobs_start=10, **WANTED)
            for prompt in prompts(known.vocabulary_size)[1:]
        ]
        rig.run()
        assert rig.decode[0].count("recomputed") >= 1
        for one in asked:
            check(known, one, first=10)


def test_experts_continue_on_the_node_to_which_a_request_migrates(known):
    with pair(known, [Size(routed_experts=RETURNED)] * 2, migrates=True) as rig:
        asked = rig.ask(range(40), 40, **WANTED)
        tokens, successor = rig.moved_midway(asked), rig.asked[-1]
        assert tokens == known.greedy(range(40), 40)
        assert not successor.prompt_logprobs
        logprobs = asked.logprobs[: len(tokens) - len(successor.tokens)] + successor.logprobs
        asked.tokens = tokens
        check(known, asked, logprobs=logprobs)


def test_experts_of_accepted_drafts_are_those_of_their_tokens(known):
    asking = prompts(known.vocabulary_size)[1:3]
    guessing = _guessing("random", known, asking)
    sizes = [Size(32, speculator=guessing.speculator, routed_experts=RETURNED)]
    with pair(known, sizes) as rig:
        asked = [rig.ask(prompt, NUM_TOKENS, **WANTED, hidden_states=True) for prompt in asking]
        rig.run()
        assert min(rig.decode[0].drafts()) > 0
        for one in asked:
            assert all(each.hidden_state for each in one.logprobs)
            check(known, one)


def test_layers_without_experts_have_zeros(tmp_path):
    directory = make_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[0], num_experts_per_tok=2)
    loaded, size = Loaded.from_directory(directory), Size(routed_experts=RETURNED)
    with PairRig(loaded, prefill=[size], decode=[size], own_models=True) as rig:
        one = rig.serve(range(20), 4, **WANTED)
        expected = reference(reference_model(directory), [*one.prompt, *one.tokens], 2)
        rows = b"".join(each.experts for each in [*one.prompt_logprobs, *one.logprobs])
        found = np.frombuffer(rows, np.int16).reshape(23, -1, 2)
        assert not found[:, 0].any()
        assert np.array_equal(np.sort(found[:, 1:], -1), expected[:-1])


def test_requests_beyond_the_limit_are_refused_before_they_are_computed(known):
    config = known.reference.config
    token_bytes = 2 * config.num_hidden_layers * config.num_experts_per_tok
    limit = RoutedExpertsConfig(enabled=True, max_request_bytes=20 * token_bytes)
    with pair(known, [Size(routed_experts=limit)]) as rig:
        refused = rig.serve(range(12), 10, **WANTED)
        assert f"experts of 21 tokens with {token_bytes} bytes" in refused.ended.error
        assert not refused.tokens and rig.decode[0].count("handoffs_opened") == 0
        check(known, rig.serve(range(12), 9, **WANTED))


def test_a_node_without_the_option_names_it_and_records_nothing(known):
    with PairRig(known.loaded) as rig:
        refused = rig.serve(range(12), 2, **WANTED)
        assert "engine.routed_experts.enabled" in refused.ended.error and not refused.tokens
        assert rig.decode[0].engine.model.routed is None


def test_a_model_without_experts_is_refused_at_start(tmp_path):
    config = EngineConfig(
        model=str(make_checkpoint(tmp_path)), device="cpu", routed_experts=RETURNED
    )
    with pytest.raises(ConfigError, match="enabled: the model has no experts"):
        build(config)


@pytest.mark.parametrize(
    "settings, backend, named",
    [
        ({"parallel": {"pp": 2}}, "native", "engine.parallel.pp: 2"),
        (
            {"scheduler": {"split_prefill_ms": 20}},
            "native",
            "engine.scheduler.split_prefill_ms: 20",
        ),
        ({}, "transformers", "engine.model_backend: transformers"),
    ],
)
def test_what_returns_no_experts_is_refused_by_name(settings, backend, named):
    config = EngineConfig.model_validate({"model": "m", "routed_experts": RETURNED, **settings})
    with pytest.raises(ConfigError, match=f"^{named} is not supported with engine.routed_experts"):
        check_routed_experts(config, backend)


def test_a_first_token_without_experts_costs_the_attempt_alone(known, monkeypatch):
    honest, lies = codec._ready_proto, iter([True])

    def lying(ready):
        message = honest(ready)
        if message.last and next(lies, False):
            message.logprobs.ClearField("routed_experts")
        return message

    monkeypatch.setattr(codec, "_ready_proto", lying)
    with pair(known) as rig:
        check(known, rig.serve(range(40), 4, **WANTED))
        assert rig.decode[0].count("handoffs_failed") == 1
