"""The counter-based random generator: the same bits as plain integers, and sufficiently random."""

import math

import pytest
import torch
import triton
import triton.language as tl

from kernels.sampling.generator import gumbel_noise, random_bits, row_keys, token_bits, token_noise
from tests.kernels.conftest import DEVICE, check_refused

WORD = 2**32


def mix(x):
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ (x >> 16)


def bits(seed, position, token):
    """Compute the same hash with integers of any size."""
    low, high = seed % WORD, seed // WORD
    first = mix((low + mix(position)) % WORD)
    second = mix(high ^ mix((position + 0x9E3779B9) % WORD))
    return mix((mix((token + first) % WORD) + second) % WORD)


def words(*seeds):
    both = [(seed % WORD, seed // WORD) for seed in seeds]
    signed = [[word - WORD if word >= WORD // 2 else word for word in pair] for pair in both]
    return torch.tensor(signed, dtype=torch.int32)


def columns(seeds, positions):
    return words(*seeds), torch.tensor(positions, dtype=torch.int32)


def test_bits_are_those_of_plain_integer_arithmetic():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**64 - 1, 0x123456789ABCDEF0]
    positions = [0, 1, 2, 77, 2**31 - 1, 4096]
    actual = random_bits(*columns(seeds, positions), 50)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in range(50):
            assert int(actual[row, token]) % WORD == bits(seed, position, token)


def test_a_row_depends_only_on_its_own_seed_and_position():
    together = random_bits(*columns([5, 6, 5], [9, 9, 10]), 100)
    assert torch.equal(together[1:2], random_bits(*columns([6], [9]), 100))
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[0], together[2])


def test_inputs_are_not_changed():
    seeds, positions = columns([5, 2**40], [9, 3])
    before = seeds.clone(), positions.clone()
    gumbel_noise(seeds, positions, 10)
    assert torch.equal(seeds, before[0]) and torch.equal(positions, before[1])


@pytest.mark.parametrize(
    "seeds, positions, vocabulary",
    [([7], [3], 200_000), ([7] * 2000, range(2000), 100), (range(2000), [7] * 2000, 100)],
    ids=["tokens", "positions", "seeds"],
)
def test_noise_is_gumbel_distributed_along_every_axis(seeds, positions, vocabulary):
    noise = gumbel_noise(*columns(seeds, list(positions)), vocabulary).flatten().sort().values
    assert noise.isfinite().all()
    expected = torch.exp(-torch.exp(-noise.double()))
    empirical = torch.arange(1, len(noise) + 1) / len(noise)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand.
    assert (expected - empirical).abs().max() < 1.95 / math.sqrt(len(noise))


def test_neighbours_are_not_correlated():
    noise = gumbel_noise(*columns([1] * 500 + list(range(500)), [*range(500), *[3] * 500]), 400)
    for one, other in (
        (noise[:499], noise[1:500]),  # next position
        (noise[500:999], noise[501:]),  # next seed
        (noise[:, :-1], noise[:, 1:]),  # next token
        (noise[:499, 1:], noise[1:500, :-1]),
    ):
        pairs = torch.stack((one.flatten(), other.flatten()))
        assert pairs.corrcoef()[0, 1].abs() < 4 / math.sqrt(pairs.shape[1])


@triton.jit
def draw_kernel(seeds_ptr, positions_ptr, bits_ptr, noise_ptr, TOKENS: tl.constexpr):
    row = tl.program_id(0)
    first, second = row_keys(seeds_ptr, positions_ptr, row)
    tokens = tl.arange(0, TOKENS)
    bits = token_bits(first, second, tokens).to(tl.int32, bitcast=True)
    tl.store(bits_ptr + row * TOKENS + tokens, bits)
    tl.store(noise_ptr + row * TOKENS + tokens, token_noise(first, second, tokens))


def test_a_kernel_draws_the_same_bits_and_the_same_noise():
    seeds, positions = columns(
        [0, 1, 2**31, 2**64 - 1, 0x123456789ABCDEF0], [0, 2**31 - 1, 7, 4096, 1]
    )
    bits = torch.empty(5, 1024, dtype=torch.int32, device=DEVICE)
    noise = torch.empty(5, 1024, device=DEVICE)
    draw_kernel[(5,)](seeds.to(DEVICE), positions.to(DEVICE), bits, noise, TOKENS=1024)
    assert torch.equal(bits.cpu(), random_bits(seeds, positions, 1024))
    expected = gumbel_noise(seeds, positions, 1024)
    torch.testing.assert_close(noise.cpu(), expected, rtol=0.0, atol=2e-6)


def test_wrong_shapes_and_dtypes_are_rejected():
    seeds, positions = columns([1, 2], [3, 4])
    check_refused("seeds", gumbel_noise, seeds[:1], positions, 5)
    check_refused("int32", gumbel_noise, seeds.long(), positions, 5)
