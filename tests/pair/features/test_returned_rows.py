"""Hidden states and routed experts across a hand-off.

Rows of the prompt come from the prefill node, all others from the decode node, and each position
has exactly one row.
"""

from array import array

import numpy as np
import pytest
import torch

from common.config import EngineConfig, HiddenStatesConfig, RoutedExpertsConfig
from common.errors import ConfigError
from engine.build import build
from engine.load import check_features
from kvtransfer.pairs import codec
from node import request_state
from tests.pair.features.test_speculation import _guessing
from tests.pair.rig import Loaded, PairRig, Size, random_prompts
from tests.support.models.checkpoints import make_checkpoint, reference_model

NUM_TOKENS = 10
TOLERANCE = 1e-4
LENGTHS = (1, 15, 64, 150)
ALONE = {"prefill": (), "mode": "colocated"}
RETURNED = RoutedExpertsConfig(enabled=True)


class HiddenStates:
    """The final hidden state that each token was predicted from."""

    name = "hidden_states"
    limits = HiddenStatesConfig

    def __init__(self, known):
        self.known = known
        self.token_bytes = 4 * known.loaded.model.spec.hidden_size

    def size(self, *args, limit=None, **fields):
        return Size(*args, **fields, **({"hidden_states": limit} if limit else {}))

    def pair(self, decode=None, **settings):
        return PairRig(self.known.loaded, decode=decode or [Size()], **settings)

    def row(self, logprobs):
        return logprobs.hidden_state

    def check(self, tokens, rows, first):
        with torch.inference_mode():
            expected = self.known.reference.model(torch.tensor([tokens])).last_hidden_state[0]
        found = torch.stack([torch.tensor(array("f", row)) for row in rows])
        assert len(found) == len(tokens) - first
        assert torch.allclose(found, expected[first - 1 : -1], atol=TOLERANCE)


class RoutedExperts:
    """The experts of the token before each token."""

    name = "routed_experts"
    limits = RoutedExpertsConfig

    def __init__(self, known):
        self.known = known
        config = known.reference.config
        self.num_experts = config.num_experts_per_tok
        self.token_bytes = 2 * config.num_hidden_layers * self.num_experts

    def size(self, *args, limit=RETURNED, **fields):
        return Size(*args, **fields, routed_experts=limit)

    def pair(self, decode=None, **settings):
        """Nodes with their own models, because a model records the experts of one forward."""
        settings.setdefault("prefill", [self.size()])
        decode = decode or [self.size()]
        return PairRig(self.known.loaded, decode=decode, own_models=True, **settings)

    def row(self, logprobs):
        return logprobs.experts

    def check(self, tokens, rows, first):
        expected = experts_of(self.known.reference, tokens, self.num_experts)
        found = np.frombuffer(b"".join(rows), np.int16).reshape(-1, *expected.shape[1:])
        assert np.array_equal(np.sort(found, -1), expected[first - 1 : -1])


def experts_of(model, tokens, k):
    """Return the experts of transformers' routers, sorted, [tokens, layers, k]."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    ids = torch.stack([layer.topk(k, -1).indices for layer in logits], dim=1)
    return ids.sort(-1).values.numpy()


@pytest.fixture(params=["hidden_states", "routed_experts"])
def returned(request, model):
    if request.param == "hidden_states":
        return HiddenStates(model("qwen3"))
    return RoutedExperts(model("qwen3_moe"))


@pytest.fixture
def experts(model):
    return RoutedExperts(model("qwen3_moe"))


def wanted(returned):
    return {returned.name: True, "logprobs": 0, "prompt_logprobs": 0}


def check(returned, one, first=1, logprobs=None):
    """Args:
    first: index of the first prompt token whose preceding row is requested.
    """
    rows = [returned.row(each) for each in [*one.prompt_logprobs, *(logprobs or one.logprobs)]]
    returned.check([*one.prompt, *one.tokens], rows, first)


@pytest.mark.parametrize(
    "pool, overlap", [("large", True), ("small", True), ("small", False), ("colocated", False)]
)
def test_rows_are_those_of_transformers(returned, overlap, pool):
    """In chunks, after retractions, beside other requests, and for prompts in the caches."""
    known = returned.known
    asking = random_prompts(known.vocabulary_size, *LENGTHS)
    size = returned.size(num_pages=12 if pool == "small" else 64)
    alone = ALONE if pool == "colocated" else {}
    with returned.pair([size], overlap_schedule=overlap, new_token_ratio=0.1, **alone) as rig:
        for _ in range(2):
            asked = [rig.ask(prompt, NUM_TOKENS, **wanted(returned)) for prompt in asking]
            other = rig.serve(asking[1], NUM_TOKENS, logprobs=1, prompt_logprobs=1)
            found = [*other.logprobs, *other.prompt_logprobs]
            assert found and not any(returned.row(each) for each in found)
            for one in asked:
                assert one.tokens == known.greedy(one.prompt, NUM_TOKENS)
                check(returned, one)


def test_rows_are_sent_once_each_when_the_prompt_is_recomputed(returned):
    with returned.pair([returned.size(swap_pages=0)], **ALONE, retract_every=3) as rig:
        asked = [
            rig.ask(prompt, NUM_TOKENS, prompt_logprobs_start=10, **wanted(returned))
            for prompt in random_prompts(returned.known.vocabulary_size, *LENGTHS)[1:]
        ]
        rig.run()
        assert rig.decode[0].count("recomputed") >= 1
        for one in asked:
            check(returned, one, first=10)


def test_rows_continue_on_the_node_to_which_a_request_migrates(returned):
    with returned.pair([returned.size()] * 2, migrates=True) as rig:
        asked = rig.ask(range(40), 40, **wanted(returned))
        tokens, successor = rig.moved_midway(asked), rig.asked[-1]
        assert tokens == returned.known.greedy(range(40), 40)
        assert not successor.prompt_logprobs
        logprobs = asked.logprobs[: len(tokens) - len(successor.tokens)] + successor.logprobs
        asked.tokens = tokens
        check(returned, asked, logprobs=logprobs)


def test_rows_of_accepted_drafts_are_those_of_their_tokens(returned):
    known = returned.known
    asking = random_prompts(known.vocabulary_size, *LENGTHS)[1:3]
    speculator = _guessing("random", known, asking).speculator
    both = wanted(returned) | {"hidden_states": True}
    with returned.pair([returned.size(32, speculator=speculator)]) as rig:
        asked = [rig.ask(prompt, NUM_TOKENS, **both) for prompt in asking]
        rig.run()
        assert min(rig.decode[0].drafts()) > 0
        for one in asked:
            assert all(each.hidden_state for each in one.logprobs)
            check(returned, one)


def test_requests_beyond_the_limit_are_refused_before_they_are_computed(returned):
    limit = returned.limits(enabled=True, max_request_bytes=20 * returned.token_bytes)
    with returned.pair([returned.size(limit=limit)]) as rig:
        refused = rig.serve(range(12), 10, **wanted(returned))
        what = returned.name.replace("_", " ")
        expected = f"return_{returned.name}: {what} of 21 tokens with {returned.token_bytes} bytes"
        assert expected in refused.ended.error
        assert not refused.tokens and rig.decode[0].count("handoffs_opened") == 0
        check(returned, rig.serve(range(12), 9, **wanted(returned)))


def test_a_node_without_the_option_names_it_and_records_nothing(returned):
    off = [returned.size(limit=returned.limits())]
    with returned.pair(off, prefill=off) as rig:
        refused = rig.serve(range(12), 2, **wanted(returned))
        assert f"engine.{returned.name}.enabled" in refused.ended.error and not refused.tokens
        assert rig.decode[0].engine.model.routed is None
        assert rig.serve(range(12), 2).tokens == returned.known.greedy(range(12), 2)


def test_a_first_token_without_its_row_fails_only_the_attempt(returned, monkeypatch):
    honest, lies = codec._ready_proto, iter([True])

    def lying(ready):
        message = honest(ready)
        if message.last and next(lies, False):
            message.logprobs.ClearField(returned.name)
        return message

    monkeypatch.setattr(codec, "_ready_proto", lying)
    with returned.pair() as rig:
        check(returned, rig.serve(range(40), 4, **wanted(returned)))
        assert rig.decode[0].count("handoffs_failed") == 1


def test_a_node_holds_the_hidden_states_of_few_requests_at_a_time(known, monkeypatch):
    states = HiddenStates(known)
    limit = 50 * states.token_bytes
    monkeypatch.setattr(request_state, "MAX_HELD_STATE_BYTES", limit)
    with states.pair() as rig:
        one, other, third = (rig.ask(range(12), 10, **wanted(states)) for _ in range(3))
        plain = rig.ask(range(12), 10)
        rig.run()
        assert f"of {limit} bytes of hidden states" in third.ended.error
        assert not third.tokens
        for each in (one, other, rig.serve(range(12), 10, **wanted(states))):
            check(states, each)
        assert plain.tokens == known.greedy(range(12), 10)


def test_layers_without_experts_have_zeros(tmp_path, experts):
    directory = make_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[0], num_experts_per_tok=2)
    loaded, size = Loaded.from_directory(directory), experts.size()
    with PairRig(loaded, prefill=[size], decode=[size], own_models=True) as rig:
        one = rig.serve(range(20), 4, **wanted(experts))
        expected = experts_of(reference_model(directory), [*one.prompt, *one.tokens], 2)
        rows = b"".join(each.experts for each in [*one.prompt_logprobs, *one.logprobs])
        found = np.frombuffer(rows, np.int16).reshape(23, -1, 2)
        assert not found[:, 0].any()
        assert np.array_equal(np.sort(found[:, 1:], -1), expected[:-1])


def test_a_model_without_experts_is_refused_at_start(tmp_path):
    config = EngineConfig(
        model=str(make_checkpoint(tmp_path)), device="cpu", routed_experts=RETURNED
    )
    with pytest.raises(ConfigError, match="enabled: the model has no experts"):
        build(config)


@pytest.mark.parametrize(
    "settings, backend, named",
    [
        (
            {"scheduler": {"split_prefill_ms": 20}},
            "native",
            "engine.scheduler.split_prefill_ms: 20",
        ),
        ({}, "transformers", "engine.model_backend: transformers"),
    ],
)
def test_a_model_that_returns_no_experts_is_rejected_by_name(settings, backend, named):
    config = EngineConfig.model_validate({"model": "m", "routed_experts": RETURNED, **settings})
    with pytest.raises(ConfigError, match=f"^{named} is not supported with engine.routed_experts"):
        check_features(config, backend)
