"""Sampling features across a hand-off.

The prefill node samples the first token and the decode node the others, with no visible difference.
"""

import pytest
import torch

from kvtransfer.pairs import codec
from tests.pair.rig import PairRig, Size, random_prompts

NUM_TOKENS = 10
TOLERANCE = 1e-4
LENGTHS = (1, 15, 64, 150)


def by_transformers(known, tokens):
    """log_softmax of the logits after each token, [tokens, vocabulary]."""
    with torch.inference_mode():
        logits = known.reference(torch.tensor([tokens])).logits[0].float()
    return logits.log_softmax(dim=-1)


def check(reported, tokens, expected, num_top):
    """Args:
    expected: log-probabilities for the positions before each of `tokens`.
    """
    assert len(reported) == len(tokens)
    for each, token, row in zip(reported, tokens, expected, strict=True):
        assert abs(each.logprob - float(row[token])) < TOLERANCE
        top = row.topk(num_top)
        assert torch.allclose(torch.tensor(each.top_logprobs), top.values, atol=TOLERANCE)
        named = row[torch.tensor(each.top_tokens, dtype=torch.long)]
        assert torch.allclose(named, top.values, atol=TOLERANCE)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
@pytest.mark.parametrize("pool", ["large", "small", "colocated"])
def test_logprobs_are_those_of_transformers(known, overlap, pool):
    """The second time the prompt is in both caches, but is computed again if its own
    log-probabilities are requested. Seen failing with the prompt matched in the cache, with the
    targets of a chunk shifted by one, and without those of the first token."""
    asking = random_prompts(known.vocabulary_size, *LENGTHS)
    num_pages = 12 if pool == "small" else 64
    with PairRig(
        known.loaded,
        prefill=() if pool == "colocated" else [Size()],
        decode=[Size(num_pages=num_pages)],
        overlap_schedule=overlap,
        new_token_ratio=0.1,
        **({"mode": "colocated"} if pool == "colocated" else {}),
    ) as rig:
        for _ in range(2):
            asked = [
                rig.ask(prompt, NUM_TOKENS, logprobs=3, prompt_logprobs=number % 3)
                for number, prompt in enumerate(asking)
            ]
            plain = rig.serve(asking[1], NUM_TOKENS)
            assert not plain.logprobs and not plain.prompt_logprobs
            for number, one in enumerate(asked):
                assert one.tokens == known.greedy(one.prompt, NUM_TOKENS)
                rows = by_transformers(known, [*one.prompt, *one.tokens])
                length = len(one.prompt)
                check(one.logprobs, one.tokens, rows[length - 1 : -1], 3)
                check(one.prompt_logprobs, one.prompt[1:], rows[: length - 1], number % 3)


@pytest.mark.parametrize("nodes", [{}, {"prefill": (), "mode": "colocated"}], ids=["pair", "one"])
def test_prompt_logprobs_begin_at_a_token_and_the_prefix_before_it_comes_from_the_cache(
    known, nodes
):
    """The cached prefix consists of whole pages, chunks and parts of both."""
    prompt = random_prompts(known.vocabulary_size, *LENGTHS)[-1]
    rows = by_transformers(known, prompt)
    with PairRig(known.loaded, **nodes) as rig:
        rig.serve(prompt, 1)
        (computing,) = rig.prefill or rig.decode
        for start in (0, 1, 2, 17, 33, 64, 65, 66, 149):
            before = computing.count("cached_tokens")
            one = rig.serve(prompt, 4, prompt_logprobs=2, prompt_logprobs_start=start)
            first = max(start, 1)
            assert one.tokens == known.greedy(prompt, 4)
            assert computing.count("cached_tokens") - before == (first - 1) // 16 * 16
            check(one.prompt_logprobs, prompt[first:], rows[first - 1 : -1], 2)


def test_prompt_logprobs_are_sent_once_each_when_the_prompt_is_recomputed(known):
    asking = random_prompts(known.vocabulary_size, *LENGTHS)[1:]
    alone = {"prefill": (), "mode": "colocated", "decode": [Size(swap_pages=0)]}
    with PairRig(known.loaded, **alone, retract_every=3) as rig:
        for number, start in enumerate((0, 20), 1):
            asked = [
                rig.ask(prompt, NUM_TOKENS, prompt_logprobs=1, prompt_logprobs_start=start)
                for prompt in asking
            ]
            rig.run()
            assert rig.decode[0].count("recomputed") >= number
            first = max(start, 1)
            for one in asked:
                rows = by_transformers(known, one.prompt)
                check(one.prompt_logprobs, one.prompt[first:], rows[first - 1 : -1], 1)


def test_prompt_logprobs_that_begin_after_the_prompt_are_empty(known):
    with PairRig(known.loaded) as rig:
        for start in (40, 41, 500):
            one = rig.serve(range(40), 4, prompt_logprobs=0, prompt_logprobs_start=start)
            assert one.tokens == known.greedy(range(40), 4) and not one.prompt_logprobs


def test_neither_node_samples_a_forbidden_token(known):
    """Compared with a colocated node, and with the request's options."""
    asking = random_prompts(known.vocabulary_size, *LENGTHS)
    likeliest = [known.greedy(prompt, NUM_TOKENS) for prompt in asking]
    wanted = [
        {"logit_bias": tuple((token, -100.0) for token in sorted(set(likeliest[0])))},
        {"allowed_token_ids": (3, 4, 5)},
        {"bad_word_ids": (tuple(likeliest[2][:1]), tuple(likeliest[2][1:3]))},
        {"bad_word_ids": (tuple(likeliest[3][:2]), tuple(likeliest[3][1:3])), "temperature": 1.0},
    ]
    answers = []
    for nodes in ({}, {"prefill": (), "mode": "colocated"}):
        with PairRig(known.loaded, **nodes) as rig:
            asked = [
                rig.ask(prompt, NUM_TOKENS, seed=7, **{"temperature": 0.0} | fields)
                for prompt, fields in zip(asking, wanted, strict=True)
            ]
            rig.run()
            answers.append([one.tokens for one in asked])
    across, alone = answers
    assert across == alone
    assert not set(across[0]) & set(likeliest[0])
    assert set(across[1]) <= {3, 4, 5}
    for tokens, fields in zip(across[2:], wanted[2:], strict=True):
        text = ",".join(map(str, tokens))
        for word in fields["bad_word_ids"]:
            assert f",{','.join(map(str, word))}," not in f",{text},"


def test_a_token_outside_the_vocabulary_in_a_request_ends_no_node(known):
    """Seen failing without RequestLimits.check_sampling: the forward raised."""
    beyond = known.vocabulary_size
    with PairRig(known.loaded) as rig:
        for fields in (
            {"logit_bias": ((beyond, 1.0),)},
            {"allowed_token_ids": (beyond,)},
            {"bad_word_ids": ((1, beyond),)},
        ):
            refused = rig.serve([1, 2, 3], 4, **fields)
            assert refused.ended.error.startswith(f"sampling.{next(iter(fields))}")
        fine = rig.serve([1, 2, 3], 4)
        assert fine.tokens == known.greedy([1, 2, 3], 4)


@pytest.mark.parametrize("missing", ["logprobs", "prompt_logprobs"])
def test_a_first_token_without_requested_logprobs_fails_only_the_attempt(
    known, monkeypatch, missing
):
    """Seen failing without the check in Handoffs: the router would have to invent them."""
    honest, lies = codec._ready_proto, iter([True])

    def lying(ready):
        message = honest(ready)
        if message.last and next(lies, False):
            message.ClearField(missing)
        return message

    monkeypatch.setattr(codec, "_ready_proto", lying)
    with PairRig(known.loaded) as rig:
        asked = rig.serve(range(40), 4, logprobs=1, prompt_logprobs=0)
        assert asked.tokens == known.greedy(range(40), 4)
        assert (len(asked.logprobs), len(asked.prompt_logprobs)) == (4, 39)
        assert rig.decode[0].count("handoffs_failed") == 1
