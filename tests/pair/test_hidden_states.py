"""Hidden states across a hand-off: those of the prompt come from the prefill node, the others from
the decode node, and each position has exactly one."""

import random
from array import array

import pytest
import torch

from common.config import HiddenStatesConfig
from kvtransfer.pairs import codec
from node import request_state
from tests.pair.rig import PairRig, Size
from tests.pair.test_speculation import _guessing

NUM_TOKENS = 10
TOLERANCE = 1e-4
LENGTHS = (1, 15, 64, 150)
SMALL = {"new_token_ratio": 0.1, "min_new_token_ratio": 0.1}
WANTED = {"hidden_states": True, "logprobs": 0, "prompt_logprobs": 0}


def prompts(vocabulary_size):
    source = random.Random(5)
    return [[source.randrange(vocabulary_size) for _ in range(length)] for length in LENGTHS]


def states(told):
    return [torch.tensor(array("f", each.hidden_state)) for each in told]


def check(known, one, first=1, logprobs=None):
    """`first`: index of the first prompt token whose preceding state is wanted."""
    with torch.inference_mode():
        tokens = torch.tensor([[*one.prompt, *one.tokens]])
        expected = known.reference.model(tokens).last_hidden_state[0]
    told = [*states(one.prompt_logprobs), *states(logprobs or one.logprobs)]
    assert len(told) == len(one.prompt) + len(one.tokens) - first
    assert torch.allclose(torch.stack(told), expected[first - 1 : -1], atol=TOLERANCE)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
@pytest.mark.parametrize("pool", ["large", "small", "colocated"])
def test_hidden_states_are_those_of_transformers(known, overlap, pool):
    """In chunks, after retractions, beside other requests, and for prompts in the caches."""
    asking = prompts(known.vocabulary_size)
    with PairRig(
        known.loaded,
        prefill=() if pool == "colocated" else [Size()],
        decode=[Size(num_pages=12 if pool == "small" else 64)],
        overlap_schedule=overlap,
        **SMALL,
        **({"mode": "colocated"} if pool == "colocated" else {}),
    ) as rig:
        for _ in range(2):
            asked = [rig.ask(prompt, NUM_TOKENS, **WANTED) for prompt in asking]
            other = rig.serve(asking[1], NUM_TOKENS, logprobs=1, prompt_logprobs=1)
            told = [*other.logprobs, *other.prompt_logprobs]
            assert told and not any(each.hidden_state for each in told)
            for one in asked:
                assert one.tokens == known.greedy(one.prompt, NUM_TOKENS)
                check(known, one)


def test_hidden_states_are_sent_once_each_when_the_prompt_is_recomputed(known):
    alone = {"prefill": (), "mode": "colocated", "decode": [Size(swap_pages=0)]}
    with PairRig(known.loaded, **alone, retract_every=3) as rig:
        asked = [
            rig.ask(prompt, NUM_TOKENS, prompt_logprobs_start=10, **WANTED)
            for prompt in prompts(known.vocabulary_size)[1:]
        ]
        rig.run()
        assert rig.decode[0].count("recomputed") >= 1
        for one in asked:
            check(known, one, first=10)


def test_hidden_states_continue_on_the_node_to_which_a_request_migrates(known):
    with PairRig(known.loaded, decode=[Size(), Size()], migrates=True) as rig:
        asked = rig.ask(range(40), 40, **WANTED)
        tokens, successor = rig.moved_midway(asked), rig.asked[-1]
        assert tokens == known.greedy(range(40), 40)
        assert not successor.prompt_logprobs
        logprobs = asked.logprobs[: len(tokens) - len(successor.tokens)] + successor.logprobs
        asked.tokens = tokens
        check(known, asked, logprobs=logprobs)


def test_hidden_states_of_accepted_drafts_are_those_of_their_tokens(known):
    asking = prompts(known.vocabulary_size)[1:3]
    with PairRig(known.loaded, decode=[_guessing("random", known, asking)]) as rig:
        asked = [rig.ask(prompt, NUM_TOKENS, **WANTED) for prompt in asking]
        rig.run()
        assert min(rig.decode[0].drafts()) > 0
        for one in asked:
            check(known, one)


def test_requests_beyond_the_limit_are_refused_before_they_are_computed(known):
    size = 4 * known.loaded.model.spec.hidden_size
    limit = HiddenStatesConfig(enabled=True, max_request_bytes=20 * size)
    with PairRig(known.loaded, decode=[Size(hidden_states=limit)]) as rig:
        refused = rig.serve(range(12), 10, **WANTED)
        assert (
            f"return_hidden_states: hidden states of 21 tokens with {size} bytes"
            in refused.ended.error
        )
        assert not refused.tokens and rig.decode[0].count("handoffs_opened") == 0
        check(known, rig.serve(range(12), 9, **WANTED))
    off = HiddenStatesConfig()
    with PairRig(known.loaded, decode=[Size(hidden_states=off)]) as rig:
        refused = rig.serve(range(12), 2, **WANTED)
        assert "engine.hidden_states.enabled" in refused.ended.error and not refused.tokens
        assert rig.serve(range(12), 2).tokens == known.greedy(range(12), 2)


def test_a_first_token_without_hidden_states_costs_the_attempt_alone(known, monkeypatch):
    honest, lies = codec._ready_proto, iter([True])

    def lying(ready):
        message = honest(ready)
        if message.last and next(lies, False):
            message.logprobs.ClearField("hidden_states")
        return message

    monkeypatch.setattr(codec, "_ready_proto", lying)
    with PairRig(known.loaded) as rig:
        check(known, rig.serve(range(40), 4, **WANTED))
        assert rig.decode[0].count("handoffs_failed") == 1


def test_a_node_holds_the_hidden_states_of_few_requests_at_a_time(known, monkeypatch):
    size = 4 * known.loaded.model.spec.hidden_size
    monkeypatch.setattr(request_state, "MAX_HELD_STATE_BYTES", 50 * size)
    with PairRig(known.loaded) as rig:
        one, other, third = (rig.ask(range(12), 10, **WANTED) for _ in range(3))
        plain = rig.ask(range(12), 10)
        rig.run()
        assert f"of {50 * size} bytes of hidden states" in third.ended.error
        assert not third.tokens
        for each in (one, other, rig.serve(range(12), 10, **WANTED)):
            check(known, each)
        assert plain.tokens == known.greedy(range(12), 10)
