"""Latents in the layout that the attention kernels expect for keys and values.

A latent is the key of all query heads, and its first numbers are the value. One program computes as
many heads as its registers have space for. So each such group acts like a KV head of its own. All
groups share one address, and each value lies within its key.
"""

from torch import Tensor

from kernels.narrow import NARROW

HEADS = 32  # maximum per program, or half as many where numbers have 32 bits or are widened


def as_heads(latents: Tensor, num_heads: int) -> Tensor:
    """Return [pages, 1, 1, page_size, size] as [pages, groups, 2, page_size, size], without a
    copy."""
    most = HEADS // 2 if latents.dtype in NARROW else HEADS * 2 // latents.element_size()
    sharing = max(size for size in range(1, most + 1) if num_heads % size == 0)
    return latents.expand(-1, num_heads // sharing, 2, -1, -1)
