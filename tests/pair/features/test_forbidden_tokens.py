"""Tokens that a request forbids, or that do not exist, across a hand-off.

The prefill node samples the first token and the decode node the others, with no visible difference.
"""

from tests.pair.rig import PairRig, random_prompts

NUM_TOKENS = 10
LENGTHS = (1, 15, 64, 150)


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
