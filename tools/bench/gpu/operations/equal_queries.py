"""Queries whose attention is computed in every kind of step, to compare the bits."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import paged_attention, plan_attention
from kernels.narrow import narrowed
from tools.bench.gpu.operations.equal_rows import Compared

PAGE_SIZE = 16
DRAFTS = 3  # of a row in a verify step

Span: TypeAlias = tuple[int, int]  # tokens [start, end) of a row


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape and the numbers of a comparison of attention.

    Attributes:
        value_dim: see `AttentionKind`.
        kept_in: dtype of keys and values in pages. None: the dtype of queries.
        sharpness: factor of the scores.
        zeros: all values are zeros, of either sign.
    """

    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 24
    value_dim: int | None = None
    kept_in: torch.dtype | None = None
    sharpness: float = 1.0
    zeros: bool = False


class KeysAndQueries:
    """Keys, values and queries of some tokens, in scattered pages."""

    def __init__(
        self, length: int, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(length)

        def numbers(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator)

        num_pages = -(-length // PAGE_SIZE) + 2
        vectors = 2 if shape.value_dim is None else 1
        kv = numbers(num_pages, shape.kv_heads, vectors, PAGE_SIZE, shape.head_dim)
        if shape.zeros:
            kv[:, :, -1] *= 0
        self.kv = narrowed(kv, 1.0, shape.kept_in or dtype).to(device, shape.kept_in or dtype)
        self._pages = torch.randperm(num_pages, generator=generator)[:-2].int().to(device)
        q = numbers(length, shape.heads, shape.head_dim) * shape.sharpness
        self.q, self.length, self._value_dim = q.to(device, dtype), length, shape.value_dim

    def attend(
        self, rows: Sequence[Span], *, window: int | None = None, decode: bool = False, **given: Any
    ) -> Tensor:
        """Return the attention of the tokens of each row. The rows share the pages.

        Args:
            decode: plan rows of one token as decode rows.
            given: `soft_cap`, `sinks` and `gate`, as for `paged_attention`.
        """
        counts = [end - start for start, end in rows]
        starts = [sum(counts[:row]) for row in range(len(rows) + 1)]
        step = AttentionRows(
            self._pages,
            self._ints([0] * len(rows)),
            self._ints(starts),
            self._ints(end for _, end in rows),
            num_tokens=starts[-1],
            num_decodes=len(rows) if decode else 0,
        )
        kind = AttentionKind(self.q.shape[1], window, self._value_dim)
        plan, gate = plan_attention(step, self.kv, kind), given.pop("gate", None)
        q = torch.cat([self.q[start:end] for start, end in rows])
        return paged_attention(q, self.kv, plan, Scoring(self.q.shape[2] ** -0.5, **given), gate)

    def _ints(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32, device=self.q.device)


def compare(
    data: KeysAndQueries, *, seed: int = 0, tokens: int = 8, **given: Any
) -> Mapping[str, Compared]:
    """Compare decode rows alone with the same tokens in other kinds of step, by kind.

    Args:
        seed: seed of the tokens and the chunks.
        tokens: number of tokens.
        given: passed to `KeysAndQueries.attend`.
    """
    draw, length = random.Random(seed), data.length
    chosen = sorted({length - 1, *(draw.randrange(length) for _ in range(tokens - 1))})
    rows = [(token, token + 1) for token in chosen]
    alone = torch.cat([data.attend([row], decode=True, **given) for row in rows])
    start, end = sorted(draw.sample(range(1, length), 2))
    chunks = [(0, start), (start, end), (end, length)]
    draw.shuffle(chunks)
    order = [token for first, past in chunks for token in range(first, past)]
    verified = [(max(0, token - DRAFTS), token + 1) for token in chosen]
    last = [sum(end - start for start, end in verified[: row + 1]) - 1 for row in range(len(rows))]
    ways = {
        "batch": data.attend(rows, decode=True, **given),
        "prompt": data.attend([(0, length)], **given)[chosen],
        "chunks": data.attend(chunks, **given)[[order.index(token) for token in chosen]],
        "verify": data.attend(verified, **given)[last],
    }
    if alone.isnan().any():
        raise ArithmeticError("attention returned NaN")
    return {name: Compared.of([(way, alone)]) for name, way in ways.items()}
