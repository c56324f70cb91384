"""Expansion of latents (MLA) to the keys and values of each head, and the rule when it is faster
than attention over latents.

Attention over latents widens queries and outputs to the width of a latent. Per query, these
products cost as much as expanding one latent to a key and a value. So for a prompt in a single
chunk, expansion is free, and keys and values have a third of the width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

ATTENDED = 2.5  # time of a product in attention relative to a matrix product (measured on a CPU)
# Of data center GPUs with 16-bit numbers: 150 to 210 operations take as long as one byte.
FLOPS_PER_BYTE = 180
TILE_TOKENS = 128  # latents that one program expands, and queries that one program computes
LEAST_QUERIES = 128  # per row on average. With fewer, a tile of queries is partly empty
# Bytes of expanded keys and values that chunks of any size may use at a time.
LEAST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class LatentExpansion:
    """The matrices that expand latents to keys and values.

    Attributes:
        keys: [heads, key_dim, rank], without the rotated part.
        values: [heads, rank, value_dim].
    """

    keys: Tensor
    values: Tensor

    def pays(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Return whether rows of (queries, tokens) are faster with expanded keys on a CPU."""
        _, key_dim, rank = self.keys.shape
        saved = sum(_pairs(queries, length) for queries, length in chunks)
        expanded = sum(length - queries for queries, length in chunks)
        expansion = expanded * rank * (key_dim + self.values.shape[2])
        return saved * 2 * (rank - key_dim) * ATTENDED > expansion

    def heads_at_once(self, chunks: Sequence[tuple[int, int]], rotated: int) -> int:
        """Return how many heads a GPU expands at a time. 0: not even one head fits.

        Uses as many bytes as the queries and outputs of attention over latents, so the memory of a
        forward does not depend on the choice.

        Args:
            rotated: numbers of a latent after the first `rank`.
        """
        heads, key_dim, _ = self.keys.shape
        tokens = sum(-(-length // TILE_TOKENS) * TILE_TOKENS for _, length in chunks)
        of_head = tokens * (key_dim + rotated + self.values.shape[2]) * self.keys.element_size()
        queries = sum(queries for queries, _ in chunks)
        most = min(heads, self.workspace_bytes(queries, rotated) // of_head)
        return most and -(-heads // -(-heads // most))  # pieces of similar size

    def workspace_bytes(self, queries: int, rotated: int) -> int:
        """Return the bytes of keys and values at a time, for any lengths of rows."""
        heads, _, rank = self.keys.shape
        return max(LEAST_BYTES, queries * heads * (2 * rank + rotated) * self.keys.element_size())

    def pays_on_gpu(
        self, chunks: Sequence[tuple[int, int]], *, rotated: int, multiprocessors: int
    ) -> bool:
        """Return whether rows of (queries, tokens) are faster with expanded keys and values on a
        GPU.

        Compares FLOPs and bytes. Both kinds of attention are assumed to be equally close to the
        limits of the device, but few heads at a time do not occupy it.
        """
        _, key_dim, rank = self.keys.shape
        queries, tokens = (sum(row[part] for row in chunks) for part in range(2))
        if queries < LEAST_QUERIES * len(chunks):
            return False
        programs = self.heads_at_once(chunks, rotated) * -(-queries // TILE_TOKENS)
        if not programs:
            return False
        pairs = sum(_pairs(queries, length) for queries, length in chunks)
        made = key_dim + self.values.shape[2]
        wide, narrow = 2 * rank + rotated, made + rotated  # numbers of a query and of its output
        product = 2 * rank * made  # of the matrices, for a query and its output or for a token
        moved = 2 * self.keys.element_size() * FLOPS_PER_BYTE  # per number that is written and read
        idle = max(1.0, multiprocessors / programs)
        over_latents = queries * (product + wide * moved) + pairs * 2 * wide
        over_keys = tokens * (product + narrow * moved) + pairs * 2 * narrow * idle
        return over_keys < over_latents


class ExpandedPlan(Protocol):
    """A plan of attention over expanded keys and values. Shared by all layers of a forward."""

    @property
    def num_tokens(self) -> int: ...

    def attend(
        self, q: Tensor, latents: Tensor, expansion: LatentExpansion, out: Tensor, *, scale: float
    ) -> None:
        """Attend from all queries of the plan.

        Args:
            q: [num_tokens, heads, key_dim + rotated].
            latents: [pages, 1, 1, page_size, rank + rotated].
            out: contiguous [num_tokens, heads, value_dim] of q's dtype, written.
        """
        ...


def _pairs(queries: int, length: int) -> int:
    """Return the number of (query, visible key) pairs of a row."""
    return queries * (length - queries) + queries * (queries + 1) // 2
