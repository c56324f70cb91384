"""Attention to latents as attention to keys and values: how the kernels see them.

A latent is the key of all query heads, and its first numbers are the value. A program has some of
the heads, as many as have room for their sums in registers. So it is as if each such group had a
KV head of its own, all at the same place, and every value within its key.
"""

from torch import Tensor

from kernels.narrow import NARROW

HEADS = 32  # of a program, at most; half as many where numbers have 32 bits, or are widened


def as_heads(latents: Tensor, num_heads: int) -> Tensor:
    """[pages, 1, 1, page_size, size] as [pages, groups, 2, page_size, size]; nothing is copied."""
    most = HEADS // 2 if latents.dtype in NARROW else HEADS * 2 // latents.element_size()
    sharing = max(size for size in range(1, most + 1) if num_heads % size == 0)
    return latents.expand(-1, num_heads // sharing, 2, -1, -1)
