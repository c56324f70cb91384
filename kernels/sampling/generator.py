"""Random numbers as a function of (seed, token index, token id), in 32-bit integer arithmetic.

The integers are exact on every device. The torch reference (for whole rows) and the Triton
functions (for any tokens of a row) give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The integer mixer "lowbias32": Christopher Wellons, Prospecting for Hash Functions, 2018.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_SALT = 0x9E3779B9 - (1 << 32)  # 2**32 / golden ratio


def gumbel_noise(seeds: Tensor, positions: Tensor, vocabulary_size: int) -> Tensor:
    """Return Gumbel(0, 1) noise for every (row, token id). argmax(logits + noise) samples
    softmax(logits).

    Args:
        seeds: int32 [n, 2], the low and the high word of each row's 64-bit seed.
        positions: int32 [n], the absolute index that the sampled token will have.
    Returns:
        float32 [n, vocabulary_size], finite. A row depends only on its own seed and position.
    Raises:
        ValueError: wrong shapes or dtypes.
    """
    if seeds.shape != (len(positions), 2) or positions.ndim != 1:
        raise ValueError(
            f"seeds [n, 2] and positions [n] expected, got {tuple(seeds.shape)} and "
            f"{tuple(positions.shape)}"
        )
    if seeds.dtype != torch.int32 or positions.dtype != torch.int32:
        raise ValueError(f"int32 expected, got {seeds.dtype} and {positions.dtype}")
    bits = random_bits(seeds, positions, vocabulary_size)
    # 23 random bits plus one half: exact in float32, and neither 0 nor 1.
    uniform = ((bits >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def random_bits(seeds: Tensor, positions: Tensor, vocabulary_size: int) -> Tensor:
    """Return int32 [n, vocabulary_size]: mix(mix(token + first) + second) with two keys per row.

    first = mix(low + mix(position)), second = mix(high ^ mix(position + salt)), all modulo 2**32.
    """
    low, high = seeds.unbind(1)
    first = _mix(low + _mix(positions.clone()))
    second = _mix(high ^ _mix(positions + _SALT))
    tokens = torch.arange(vocabulary_size, dtype=torch.int32, device=seeds.device)
    return _mix(_mix(tokens + first.unsqueeze(1)).add_(second.unsqueeze(1)))


def _mix(x: Tensor) -> Tensor:
    """Apply a bijection of 32-bit words in place. int32 products wrap, shifts are masked."""
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(_MULTIPLIERS[0])
    x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_MULTIPLIERS[1])
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


@triton.jit
def row_keys(seeds, positions, row):
    """Return the keys of one row, uint32, for `token_bits` and `token_noise`."""
    low = tl.load(seeds + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(seeds + 2 * row + 1).to(tl.uint32, bitcast=True)
    position = tl.load(positions + row).to(tl.uint32, bitcast=True)
    first = _mix_words(low + _mix_words(position))
    second = _mix_words(high ^ _mix_words(position + 0x9E3779B9))
    return first, second


@triton.jit
def token_bits(first, second, tokens):
    """Return `random_bits` of tokens int32 [any shape], as uint32."""
    return _mix_words(_mix_words(tokens.to(tl.uint32, bitcast=True) + first) + second)


@triton.jit
def token_noise(first, second, tokens):
    """Return `gumbel_noise` of tokens int32 [any shape], equal up to the logarithm's rounding."""
    uniform = ((token_bits(first, second, tokens) >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _mix_words(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
