"""Sampling: possible tokens, their frequencies, and the inputs on which they depend."""

import math
from dataclasses import fields

import pytest
import torch

from kernels import device
from kernels.sampling.sample import (
    NOT_FINITE,
    SamplingColumns,
    sample,
    sample_reference,
    sample_triton,
)
from tests.kernels.conftest import DEVICE, check_refused

pytestmark = pytest.mark.slow

VOCABULARY = 11


def columns(n, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, seed=0, positions=None):
    """Return the same parameters for n rows, at positions 0, 1, 2, ..."""
    return SamplingColumns(
        temperature=torch.full((n,), float(temperature), device=DEVICE),
        top_k=torch.full((n,), top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.full((n,), float(top_p), device=DEVICE),
        min_p=torch.full((n,), float(min_p), device=DEVICE),
        seeds=torch.tensor([seed, 0], dtype=torch.int32, device=DEVICE).repeat(n, 1),
        positions=torch.arange(n, dtype=torch.int32, device=DEVICE)
        if positions is None
        else positions,
    )


def stacked(*parts):
    names = (field.name for field in fields(SamplingColumns))
    return SamplingColumns(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def few_or(many, implementation, *, few):
    """Return fewer rows for Triton's interpreter, which takes about 30 ms for a row."""
    return few if implementation == "triton" and device.INTERPRETED else many


def kept(logits, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """Return the renormalized distribution after the filters, in Python floats, by their
    definition: the k likeliest tokens, of those the fewest that make top_p, of those the ones at
    least min_p times as likely as the likeliest."""
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
def test_tokens_have_the_frequency_of_their_probability(filters, implementation):
    logits = torch.randn(VOCABULARY) * 1.5
    n = few_or(20_000, implementation, few=3)
    tokens = sample(logits.repeat(n, 1).to(DEVICE), columns(n, **filters)).cpu()
    expected = kept(logits.tolist(), **filters)
    counts = tokens.bincount(minlength=VOCABULARY)
    assert {token for token in range(VOCABULARY) if counts[token]} <= expected.keys()
    chi_square = sum(
        (int(counts[token]) - n * p) ** 2 / (n * p) for token, p in expected.items() if p * n > 5
    )
    assert chi_square < 35  # 10 degrees of freedom: exceeded once in ten thousand


@pytest.mark.parametrize("vocabulary", [1, 2, 37, 1000])
def test_greedy_picks_the_likeliest_token_and_of_equal_ones_the_lowest(vocabulary, implementation):
    n = few_or(64, implementation, few=5)
    logits = torch.randint(0, 5, (n, vocabulary), device=DEVICE).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits.clone(), None).tolist() == expected
    assert sample(logits.clone(), columns(n, temperature=0.0)).tolist() == expected


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_of_equal_logits_at_the_limit_of_a_filter_the_lower_tokens_stay(filters, implementation):
    n = few_or(500, implementation, few=8)
    logits = torch.tensor([[1.0, 1.5, 1.0, 1.0]], device=DEVICE).repeat(n, 1)
    assert set(sample(logits, columns(n, **filters)).tolist()) == {0, 1}


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_k": 3, "top_p": 0.99}], ids=str)
def test_the_likeliest_token_is_found_at_any_place(filters, implementation):
    n = few_or(500, implementation, few=8)
    logits = torch.full((515,), -5.0, device=DEVICE)
    logits[::100] = 5.0 - 0.01 * torch.arange(6, device=DEVICE)
    assert set(sample(logits.repeat(n, 1), columns(n, **filters)).tolist()) == {0, 100, 200}


def test_zeros_of_both_signs_are_equal(implementation):
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], device=DEVICE)
    for parameters in (None, columns(2, top_k=1), columns(2, top_p=0.3), columns(2, top_p=0.0)):
        assert sample(logits.clone(), parameters).tolist() == [1, 1]


def test_a_tiny_temperature_is_greedy(implementation):
    n = few_or(50, implementation, few=6)
    logits = torch.randn(n, VOCABULARY, device=DEVICE) * 0.01
    expected = logits.argmax(-1)
    assert torch.equal(sample(logits, columns(n, temperature=1e-30)), expected.int())


def test_a_token_depends_only_on_its_own_row_seed_and_position(implementation):
    logits = torch.randn(6, VOCABULARY, device=DEVICE)
    parts = [
        columns(1, seed=4, positions=torch.tensor([70], dtype=torch.int32, device=DEVICE)),
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


def test_another_seed_or_position_gives_other_tokens(implementation):
    n = few_or(64, implementation, few=6)
    logits = torch.zeros(n, 1000, device=DEVICE)
    tokens = sample(logits.clone(), columns(n, seed=1))
    assert torch.equal(tokens, sample(logits.clone(), columns(n, seed=1)))
    later = torch.arange(n, 2 * n, dtype=torch.int32, device=DEVICE)
    for other in (columns(n, seed=2), columns(n, seed=1, positions=later)):
        assert (tokens != sample(logits.clone(), other)).float().mean() > 0.9


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_a_row_that_is_not_finite_is_reported_and_affects_no_other(
    bad, temperature, implementation
):
    logits = torch.randn(3, 100, device=DEVICE)
    parameters = None if temperature is None else columns(3, temperature=temperature, top_p=0.5)
    good = sample(logits.clone(), parameters)
    logits[1, 70] = bad
    tokens = sample(logits, parameters)
    assert tokens.tolist() == [int(good[0]), NOT_FINITE, int(good[2])]


def test_no_rows_give_no_tokens(implementation):
    for parameters in (None, columns(0)):
        assert sample(torch.empty(0, VOCABULARY, device=DEVICE), parameters).shape == (0,)


def test_wrong_shapes_strides_and_dtypes_are_rejected():
    check_refused("float32", sample, torch.zeros(2, 5, dtype=torch.float64), None)
    check_refused("strides", sample, torch.zeros(5, 2).T, None)
    check_refused("3 parameters for 2 rows", sample, torch.zeros(2, 5), columns(3))
    of_three = columns(2, positions=torch.zeros(3, dtype=torch.int32))
    check_refused("positions", sample, torch.zeros(2, 5), of_three)


def mixture(n):
    """Return rows of all kinds: every parameter off, usual and extreme, alone and combined."""

    def choice(*values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (n,))]

    return SamplingColumns(
        temperature=choice(1.0, 0.0, 0.6, 2.0, 1e-30, 50.0),
        top_k=choice(-1, 0, 1, 3, 20, 100, 5000, dtype=torch.int32),
        top_p=choice(1.0, 0.95, 0.5, 0.1, 1e-6, 0.9999),
        min_p=choice(0.0, 0.0, 0.1, 1.0),
        seeds=torch.randint(-(2**31), 2**31 - 1, (n, 2), dtype=torch.int32),
        positions=torch.randint(0, 2**31 - 1, (n,), dtype=torch.int32),
    )


def vars_of(parameters):
    return {field.name: getattr(parameters, field.name) for field in fields(parameters)}


def on(target, parameters):
    return SamplingColumns(
        **{name: column.to(target) for name, column in vars_of(parameters).items()}
    )


LOGITS = {
    "usual": lambda n, vocabulary: torch.randn(n, vocabulary) * 3,
    "flat": lambda n, vocabulary: torch.randn(n, vocabulary) * 0.01 - 100,
    "ties": lambda n, vocabulary: torch.randint(-2, 3, (n, vocabulary)).float(),
    "equal": lambda n, vocabulary: torch.zeros(n, vocabulary),
    "float16": lambda n, vocabulary: (torch.randn(n, vocabulary) * 3).half(),
}


def drawn(kind, n, vocabulary, device="cpu"):
    """Return parameters, logits, and the same logits in rows with NaN between them."""
    logits = LOGITS[kind](n, vocabulary)
    wide = torch.full((n, vocabulary + 3), torch.nan, dtype=logits.dtype, device=device)
    wide[:, :vocabulary] = logits
    return mixture(n), logits, wide[:, :vocabulary]


@pytest.mark.parametrize(
    "kind, n, vocabulary",
    [
        ("usual", 6, 1),
        ("ties", 8, 11),
        ("equal", 4, 37),
        ("usual", 8, 1000),
        ("float16", 6, 1000),
        ("flat", 6, 1000),
        ("ties", 4, 4099),  # two blocks of the outline, and many incomplete groups
        ("float16", 2, 9001),  # and two blocks of the race
    ],
)
def test_triton_chooses_the_tokens_of_the_reference(kind, n, vocabulary):
    parameters, logits, strided = drawn(kind, n, vocabulary, DEVICE)
    tokens = sample_triton(strided, on(DEVICE, parameters))
    assert tokens.tolist() == sample_reference(logits, parameters).tolist()


@pytest.mark.parametrize("kind", LOGITS)
def test_compiled_code_for_a_cpu_chooses_the_tokens_of_the_reference(kind, operators):
    parameters, logits, strided = drawn(kind, 60, 4099)
    tokens = operators.sample(strided, **vars_of(parameters), not_finite=NOT_FINITE)
    assert tokens.tolist() == sample_reference(logits, parameters).tolist()


def test_triton_compares_all_blocks_of_a_large_vocabulary():
    logits = torch.zeros(8, 20_000)
    logits[4:] = -60.0
    logits[4:, 19_000:] = 0.0  # only the last of three blocks has likely tokens
    parameters = columns(8, seed=5)
    tokens = sample_triton(logits.to(DEVICE), parameters)
    assert tokens.tolist() == sample_reference(logits, on("cpu", parameters)).tolist()
    assert len({token // 8192 for token in tokens.tolist()}) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gpu_chooses_the_tokens_of_the_reference_on_a_cpu(dtype):
    logits = (torch.randn(64, 151936) * 3).to(dtype)
    logits[60:] = 1.0  # all equal: the most work
    for parameters in (None, columns(64), mixture(64)):
        here = None if parameters is None else on("cpu", parameters)
        there = None if parameters is None else on("cuda", parameters)
        tokens = sample(logits.cuda(), there)
        assert tokens.tolist() == sample_reference(logits.clone(), here).tolist()
