"""Paged attention against a float64 softmax over each query's own keys, pool poisoned with NaN."""

import math
import random

import pytest
import torch

from kernels import attention
from kernels.attention import paged_attention, plan_attention

NUM_LAYERS = 2


class Case:
    """A batch of (queries, length) rows over a NaN pool in which only their own keys are real."""

    def __init__(self, rows, *, page_size, heads=4, kv_heads=2, head_dim=8):
        generator = random.Random(0)
        needed = [-(-length // page_size) for _, length in rows]
        order = generator.sample(range(sum(needed) + 3), sum(needed))
        pool = torch.full((sum(needed) + 3, kv_heads, NUM_LAYERS, 2, page_size, head_dim), math.nan)
        self.kv = pool[:, :, 1]
        self.rows = rows
        self.page_size = page_size
        # Entries past a row's pages are noise that nobody may follow.
        self.page_table = torch.full((len(rows), max(needed) + 1), 10**9, dtype=torch.int32)
        self.keys, self.values = [], []
        for row, (_, length) in enumerate(rows):
            pages = torch.tensor([order.pop() for _ in range(needed[row])])
            self.page_table[row, : len(pages)] = pages
            k, v = torch.randn(2, length, kv_heads, head_dim)
            places = torch.arange(length)
            self.kv[pages[places // page_size], :, 0, places % page_size] = k
            self.kv[pages[places // page_size], :, 1, places % page_size] = v
            self.keys.append(k)
            self.values.append(v)
        counts = [queries for queries, _ in rows]
        self.query_starts = torch.tensor([0, *counts]).cumsum(0).int()
        self.lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
        # Strided as the fused projection leaves it.
        self.q = torch.randn(sum(counts), heads + 3, head_dim)[:, :heads]

    def attend(self, window=None):
        plan = plan_attention(
            self.page_table,
            self.query_starts,
            self.lengths,
            page_size=self.page_size,
            page_bytes=self.kv[0].nbytes,
            window=window,
        )
        return paged_attention(self.q, self.kv, plan, scale=0.3)

    def expected(self, window=None):
        group = self.q.shape[1] // self.kv.shape[1]
        out = []
        for row, (queries, length) in enumerate(self.rows):
            for query in range(queries):
                token = length - queries + query
                first = 0 if window is None else max(0, token - window + 1)
                k = self.keys[row][first : token + 1].double()
                v = self.values[row][first : token + 1].double()
                q = self.q[int(self.query_starts[row]) + query].double()
                heads = []
                for head in range(len(q)):
                    weights = (0.3 * k[:, head // group] @ q[head]).softmax(0)
                    heads.append(weights @ v[:, head // group])
                out.append(torch.cat(heads))
        return torch.stack(out)


SHAPES = [
    [(1, 1)],
    [(1, 17), (1, 1), (1, 33), (1, 16), (1, 5)],  # decode, lengths around pages
    [(16, 16)],
    [(17, 17), (3, 3)],
    [(5, 40), (1, 64), (20, 20), (1, 7)],  # chunk after a prefix, decode and a prompt, mixed
    [(300, 310), (1, 100), (2, 31)],  # more queries than share a mask
]


@pytest.mark.parametrize("rows", SHAPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 50, 1000])
def test_every_query_sees_exactly_its_keys(rows, page_size, window):
    case = Case(rows, page_size=page_size)
    actual = case.attend(window)
    torch.testing.assert_close(actual.double(), case.expected(window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(1, 1, 2), (6, 2, 10), (8, 1, 32), (3, 3, 4)]
)
def test_query_heads_share_kv_heads_in_order(heads, kv_heads, head_dim):
    rows = [(1, 20), (4, 30), (1, 9)]
    case = Case(rows, page_size=16, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    torch.testing.assert_close(case.attend().double(), case.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("group_bytes", [1, 3000, 9000])
def test_rows_agree_however_they_are_grouped(monkeypatch, group_bytes):
    monkeypatch.setattr(attention, "GROUP_BYTES", group_bytes)
    case = Case([(1, 40), (1, 3), (1, 17), (1, 64), (1, 16)], page_size=16)
    for window in (None, 20):
        torch.testing.assert_close(
            case.attend(window).double(), case.expected(window), atol=2e-6, rtol=1e-5
        )


def test_wrong_shapes_are_refused():
    case = Case([(1, 5), (1, 6)], page_size=16)
    good = {"page_size": 16, "page_bytes": 1}
    with pytest.raises(ValueError, match="page_table"):
        plan_attention(case.page_table[:1], case.query_starts, case.lengths, **good)
    with pytest.raises(ValueError, match="query_starts"):
        plan_attention(case.page_table, case.query_starts[:2], case.lengths, **good)
    with pytest.raises(ValueError, match="window"):
        plan_attention(case.page_table, case.query_starts, case.lengths, window=0, **good)
    plan = plan_attention(case.page_table, case.query_starts, case.lengths, **good)
    with pytest.raises(ValueError, match="tokens"):
        paged_attention(case.q[:1], case.kv, plan, scale=1.0)
    with pytest.raises(ValueError, match="fit"):
        paged_attention(case.q[:, :3], case.kv, plan, scale=1.0)
    with pytest.raises(ValueError, match="kv"):
        paged_attention(case.q, case.kv[:, :, 0], plan, scale=1.0)
