"""The keys and values that each head makes of latents, and the work of attention with and without
them.

Attention over latents themselves widens queries and outputs to the width of a latent. Those
products cost as much per query as expanding one latent to a key and a value. So expansion is free
for a prompt in a single chunk, and keys and values are a third as wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

ATTENDED = 2.5  # time of a product in attention relative to a matrix product (measured on a CPU)
# Of data center GPUs with 16-bit numbers, from 150 to 210. A byte takes the time of so many.
FLOPS_PER_BYTE = 180
TILE_TOKENS = 128  # of latents that one program expands, and of queries that one attends from
LEAST_QUERIES = 128  # of a row on average. Fewer leave a tile of queries partly empty
LEAST_BYTES = 256 << 20  # of expanded keys and values that chunks of any size may have at a time


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
        """Return whether these rows, (queries, tokens) each, are faster with expanded keys and
        values on a CPU."""
        _, key_dim, rank = self.keys.shape
        saved = sum(_pairs(queries, length) for queries, length in chunks)
        expanded = sum(length - queries for queries, length in chunks)
        expansion = expanded * rank * (key_dim + self.values.shape[2])
        return saved * 2 * (rank - key_dim) * ATTENDED > expansion

    def heads_at_once(self, chunks: Sequence[tuple[int, int]], rotated: int) -> int:
        """Return of how many heads a GPU expands keys and values at a time. 0 if not even those of
        one head fit.

        As many bytes are used as the queries and outputs of attention over latents have. So the
        memory of a forward does not depend on the choice between both.

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
        """Return the bytes of keys and values at a time, whatever the lengths of rows."""
        heads, _, rank = self.keys.shape
        return max(LEAST_BYTES, queries * heads * (2 * rank + rotated) * self.keys.element_size())

    def pays_on_gpu(
        self, chunks: Sequence[tuple[int, int]], *, rotated: int, multiprocessors: int
    ) -> bool:
        """Return whether these rows, (queries, tokens) each, take less time with expanded keys and
        values on a GPU.

        FLOPs and bytes are counted. Both kinds of attention are assumed to be equally close to the
        limits of the device, except that few heads at a time do not occupy it.
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
        wide, narrow = 2 * rank + rotated, made + rotated  # numbers of a query and its output
        product = 2 * rank * made  # of the matrices: for a query and its output, or for a token
        moved = 2 * self.keys.element_size() * FLOPS_PER_BYTE  # of a number, written and read
        idle = max(1.0, multiprocessors / programs)
        over_latents = queries * (product + wide * moved) + pairs * 2 * wide
        over_keys = tokens * (product + narrow * moved) + pairs * 2 * narrow * idle
        return over_keys < over_latents


class ExpandedPlan(Protocol):
    """The keys that each query of the chunks sees. The layers of one forward share it."""

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
    """Return how many keys a row's queries see together."""
    return queries * (length - queries) + queries * (queries + 1) // 2
