"""Attention on a CPU gives the same bits for a query in a decode step and in a prompt."""

import random

import pytest
import torch

from kernels import device
from kernels.cpu.operators import DTYPES
from tools.bench.gpu.operations.equal_queries import KeysAndQueries, compare

SIZES = [10, 24, 64, 96, 128, 256]
LENGTHS = [3, 15, 16, 63, 64, 65, 127, 128, 511, 512, 513, 700, 1024, 1100]


class Paged(KeysAndQueries):
    """Keys, values and queries of a row, in pages of any size. Everything after the last token is
    NaN."""

    def __init__(self, q: torch.Tensor, kv: torch.Tensor, page_size: int) -> None:
        vectors, length, kv_heads, size = kv.shape
        num_pages = -(-length // page_size)
        pages, tokens = torch.randperm(num_pages + 2)[:num_pages], torch.arange(length)
        shape = (num_pages + 2, kv_heads, vectors, page_size, size)
        self.kv = torch.full(shape, torch.nan, dtype=q.dtype)
        for vector in range(vectors):
            self.kv[pages[tokens // page_size], :, vector, tokens % page_size] = kv[vector]
        self._pages, self.q, self.length, self._value_dim = pages.int(), q, length, None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_decode_and_extend_give_the_same_bits(teams, monkeypatch, seeds, dtype):
    """With pages of any size, and any number of threads."""
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        monkeypatch.setattr(device, "compiled_for", lambda where, draw=draw: draw.choice(teams))
        length = draw.choice(LENGTHS) if draw.random() < 0.7 else draw.randint(3, 1400)
        kv_heads, size = draw.choice([1, 2]), draw.choice(SIZES)
        heads = kv_heads * draw.choice([1, 2, 3, 4, 7])
        sharpness = draw.choice([0.1, 1.0, 10.0])  # large queries often raise the largest score
        q = (torch.randn(length, heads, size) * sharpness).to(dtype)
        kv = torch.randn(2, length, kv_heads, size).to(dtype)
        options = {
            "window": draw.choice([None, None, 7, 100, 600]),
            "soft_cap": draw.choice([None, None, 5.0]),
            "sinks": torch.randn(heads) if draw.random() < 0.3 else None,
        }
        rows = [Paged(q, kv, page_size) for page_size in draw.sample([16, 32, 64, 128], 2)]
        for row in rows:
            found = compare(row, seed=seed, **options)
            assert not any(way.differing for way in found.values()), (seed, found)
        assert torch.equal(*(row.attend([(0, length)], **options) for row in rows))
