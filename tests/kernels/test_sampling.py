"""Sampling: which tokens may come, how often they do, and on what alone they depend."""

import math

import pytest
import torch

from kernels.sampling import NOT_FINITE, SamplingColumns, sample

VOCABULARY = 11


def columns(n, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, seed=0, positions=None):
    """The same parameters for n rows, at positions 0, 1, 2, ..."""
    filtered = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
    return SamplingColumns(
        temperature=torch.full((n,), float(temperature)),
        top_k=torch.full((n,), top_k, dtype=torch.int32),
        top_p=torch.full((n,), float(top_p)),
        min_p=torch.full((n,), float(min_p)),
        seeds=torch.tensor([[seed, 0]] * n, dtype=torch.int32),
        positions=torch.arange(n, dtype=torch.int32) if positions is None else positions,
        filtered=torch.arange(n if filtered else 0),
    )


def stacked(*parts):
    offsets = [sum(len(part.temperature) for part in parts[:i]) for i in range(len(parts))]
    return SamplingColumns(
        **{
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
        },
        filtered=torch.cat(
            [part.filtered + offset for part, offset in zip(parts, offsets, strict=True)]
        ),
    )


def kept(logits, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """The renormalised distribution after the filters, in Python floats, straight from the words:
    the k likeliest; of those the fewest that make top_p; of those the ones at least min_p times as
    likely as the likeliest."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[token] for token in order)
    nucleus, mass = [], 0.0
    for token in order:
        if mass / total >= top_p and nucleus:
            break
        nucleus.append(token)
        mass += weights[token]
    chosen = [token for token in nucleus if weights[token] >= min_p * max(weights)]
    total = sum(weights[token] for token in chosen)
    return {token: weights[token] / total for token in chosen}


FILTERS = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 100},
    {"top_p": 0.01},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 8, "top_p": 0.95, "min_p": 0.15},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_come_as_often_as_their_probability_says(filters):
    logits = torch.randn(VOCABULARY) * 1.5
    n = 20_000
    tokens = sample(logits.repeat(n, 1), columns(n, **filters))
    expected = kept(logits.tolist(), **filters)
    counts = tokens.bincount(minlength=VOCABULARY)
    assert {token for token in range(VOCABULARY) if counts[token]} <= expected.keys()
    chi_square = sum(
        (int(counts[token]) - n * p) ** 2 / (n * p) for token, p in expected.items() if p * n > 5
    )
    assert chi_square < 35  # 10 degrees of freedom: exceeded once in ten thousand


@pytest.mark.parametrize("vocabulary", [1, 2, 37, 1000])
def test_greedy_takes_the_likeliest_and_of_equals_the_lowest(vocabulary):
    logits = torch.randint(0, 5, (64, vocabulary)).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits.clone(), None).tolist() == expected
    assert sample(logits.clone(), columns(64, temperature=0.0)).tolist() == expected


def test_equal_logits_at_the_edge_of_top_k_keep_the_lower_token():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]]).repeat(500, 1)
    assert set(sample(logits, columns(500, top_k=2)).tolist()) == {0, 1}


def test_a_tiny_temperature_is_greedy():
    logits = torch.randn(50, VOCABULARY) * 100
    expected = logits.argmax(-1)
    assert torch.equal(sample(logits, columns(50, temperature=1e-30)), expected.int())


def test_a_token_depends_on_its_own_row_seed_and_position_alone():
    logits = torch.randn(6, VOCABULARY)
    parts = [
        columns(1, seed=4, positions=torch.tensor([70], dtype=torch.int32)),
        columns(1, temperature=0.0),
        columns(1, top_k=3, seed=9),
        columns(1, temperature=1.7, top_p=0.5, seed=-3),
        columns(1, min_p=0.3, seed=8),
        columns(1, seed=1),
    ]
    alone = [int(sample(logits[i : i + 1].clone(), part)) for i, part in enumerate(parts)]
    assert sample(logits.clone(), stacked(*parts)).tolist() == alone
    order = [3, 1, 5, 0, 4, 2]
    mixed = sample(logits[order], stacked(*(parts[i] for i in order)))
    assert mixed.tolist() == [alone[i] for i in order]


def test_another_seed_or_position_gives_other_tokens():
    logits = torch.zeros(64, 1000)
    tokens = sample(logits.clone(), columns(64, seed=1))
    assert torch.equal(tokens, sample(logits.clone(), columns(64, seed=1)))
    others = (
        columns(64, seed=2),
        columns(64, seed=1, positions=torch.arange(64, 128, dtype=torch.int32)),
    )
    for other in others:
        assert (tokens != sample(logits.clone(), other)).float().mean() > 0.9


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_says_so_and_harms_no_other(bad, temperature):
    logits = torch.randn(3, VOCABULARY)
    good = sample(logits.clone(), columns(3, temperature=temperature, top_k=5))
    logits[1, 4] = bad
    tokens = sample(logits, columns(3, temperature=temperature, top_k=5))
    assert tokens.tolist() == [int(good[0]), NOT_FINITE, int(good[2])]


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, VOCABULARY), None).shape == (0,)


def test_wrong_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="float32"):
        sample(torch.zeros(2, 5, dtype=torch.float64), None)
    with pytest.raises(ValueError, match="3 parameters for 2 rows"):
        sample(torch.zeros(2, 5), columns(3))
