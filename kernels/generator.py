"""Random numbers as a function of (seed, token index, token id), in 32-bit integer arithmetic.

The integers are exact on every device: the same hash in a Triton kernel gives the same bits.
"""

import torch
from torch import Tensor

# The integer mixer "lowbias32": Christopher Wellons, Prospecting for Hash Functions, 2018.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_SALT = 0x9E3779B9 - (1 << 32)  # 2**32 / golden ratio


def gumbel_noise(seeds: Tensor, positions: Tensor, vocabulary_size: int) -> Tensor:
    """Gumbel(0, 1) noise for every (row, token id): argmax(logits + noise) samples softmax(logits).

    Args:
        seeds: int32 [n, 2], the low and the high word of each row's 64-bit seed.
        positions: int32 [n], the absolute index that the sampled token will have.
    Returns:
        float32 [n, vocabulary_size], finite. A row depends on its own seed and position alone.
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
    # 23 bits and a half: exact in float32, and neither 0 nor 1.
    uniform = ((bits >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def random_bits(seeds: Tensor, positions: Tensor, vocabulary_size: int) -> Tensor:
    """int32 [n, vocabulary_size]: mix(mix(token + first) + second) with two keys per row.

    first = mix(low + mix(position)), second = mix(high ^ mix(position + salt)); all modulo 2**32.
    """
    low, high = seeds.unbind(1)
    first = _mix(low + _mix(positions.clone()))
    second = _mix(high ^ _mix(positions + _SALT))
    tokens = torch.arange(vocabulary_size, dtype=torch.int32, device=seeds.device)
    return _mix(_mix(tokens + first.unsqueeze(1)).add_(second.unsqueeze(1)))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, in place: int32 products wrap, right shifts are masked."""
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(_MULTIPLIERS[0])
    x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_MULTIPLIERS[1])
    return x.bitwise_xor_((x >> 16) & 0xFFFF)
