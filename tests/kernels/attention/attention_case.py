"""Batches for paged attention over a pool in which everything except the rows' own keys is NaN."""

import math
import random
from dataclasses import replace

import torch

from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import paged_attention, plan_attention
from kernels.narrow import narrowed
from tests.kernels.conftest import DEVICE

NUM_LAYERS = 2
SCALE = 0.3


class Case:
    """A batch of (queries, length) rows, the last of which, with one query each, are decode rows.

    With `value_dim`, a token has one latent, the first numbers of which are the value.
    """

    planner = staticmethod(plan_attention)

    def __init__(
        self,
        rows,
        *,
        page_size=16,
        heads=4,
        kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        enveloped=True,
        value_dim=None,
        kept_in=None,
    ):
        self.rows, self.value_dim = rows, value_dim
        vectors = 2 if value_dim is None else 1
        needed = [-(-length // page_size) for _, length in rows]
        shape = (kv_heads, page_size, head_dim)
        self.kv = _layer(sum(needed) + 3, *shape, dtype, enveloped, vectors)
        order = random.Random(0).sample(range(sum(needed) + 3), sum(needed))
        # Entries between the rows' pages are random and must not be used.
        noise = [10**9]
        entries, self.page_starts = [], []
        self.keys, self.values = [], []
        for num_pages, (_, length) in zip(needed, rows, strict=True):
            pages = [order.pop() for _ in range(num_pages)]
            self.page_starts.append(len(entries))
            entries += pages + noise
            kept = torch.randn(vectors, length, kv_heads, head_dim, device=DEVICE).to(dtype)
            if kept_in is not None:
                kept = narrowed(kept, 1.0, kept_in).to(dtype)
            places = torch.arange(length)
            where = torch.tensor(pages, dtype=torch.int64)[places // page_size].to(DEVICE)
            for vector, numbers in enumerate(kept):
                self.kv[where, :, vector, places.to(DEVICE) % page_size] = numbers
            self.keys.append(kept[0])
            self.values.append(kept[-1, ..., :value_dim])
        if kept_in is not None:
            self.kv = _in_8_bits(self.kv, kept_in)
        counts = [queries for queries, _ in rows]
        self.num_decodes = 0
        while self.num_decodes < len(rows) and counts[-1 - self.num_decodes] == 1:
            self.num_decodes += 1
        self.page_ids, self.page_starts = _ints(entries), _ints(self.page_starts)
        self.query_starts = _ints([sum(counts[:row]) for row in range(len(rows) + 1)])
        self.lengths = _ints([length for _, length in rows])
        # Strided as the fused projection leaves it.
        q = torch.randn(sum(counts), heads + 3, head_dim, device=DEVICE).to(dtype)
        self.q = q[:, :heads]

    def plan(self, **changes):
        """Return the plan with changed fields of the rows or of the layer type."""
        of_kind = {name: changes.pop(name) for name in AttentionKind._fields if name in changes}
        kind = AttentionKind(self.q.shape[1], None, self.value_dim)._replace(**of_kind)
        if kind.window:
            changes["page_ids"] = self._without_unseen(kind.window)
        return self.planner(replace(self.step, **changes), self.kv, kind)

    @property
    def step(self):
        return AttentionRows(
            self.page_ids,
            self.page_starts,
            self.query_starts,
            self.lengths,
            self.q.shape[0],
            self.num_decodes,
        )

    def _without_unseen(self, window):
        """Remove pages before a window."""
        page_ids, page_size = self.page_ids.clone(), self.kv.shape[3]
        for start, (queries, length) in zip(self.page_starts.tolist(), self.rows, strict=True):
            first = max(0, length - queries - window + 1) // page_size
            page_ids[start : start + first] = 10**9
        return page_ids

    def attend(self, window=None, soft_cap=None, sinks=None):
        plan = self.plan(window=window)
        return paged_attention(self.q, self.kv, plan, Scoring(SCALE, soft_cap, sinks))

    def expected(self, window=None, soft_cap=None, sinks=None):
        """Compute in float64, each row by itself."""
        group = self.q.shape[1] // self.kv.shape[1]
        counts = [queries for queries, _ in self.rows]
        out = []
        for q, k, v in zip(self.q.split(counts), self.keys, self.values, strict=True):
            k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
            scores = SCALE * torch.einsum("qhd,khd->hqk", q.double(), k)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            keys = torch.arange(len(k), device=DEVICE)
            tokens = torch.arange(len(k) - len(q), len(k), device=DEVICE).unsqueeze(1)
            hidden = keys > tokens
            if window is not None:
                hidden |= keys <= tokens - window
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:  # a key without a value
                beside = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
                scores = torch.cat((scores, beside), dim=-1)
            weights = scores.softmax(-1)[..., : len(k)]
            out.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        return torch.cat(out)

    def check(self, window=None, soft_cap=None, sinks=None, *, atol=2e-6, rtol=1e-5):
        actual = self.attend(window, soft_cap, sinks)
        assert actual.dtype == self.q.dtype
        expected = self.expected(window, soft_cap, sinks)
        torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=rtol)

    def check_gated(self):
        """Gates are stored between the queries, as in the output of the projection."""
        size = self.q.shape
        gate = torch.randn(*size[:2], 2, size[2], device=DEVICE)[:, :, 1]
        attended = paged_attention(self.q, self.kv, self.plan(), Scoring(SCALE), gate=gate)
        expected = self.expected().nan_to_num() * gate.double().flatten(1).sigmoid()
        torch.testing.assert_close(attended.double(), expected, atol=2e-6, rtol=1e-5)

    def check_layers_of_one_plan(self):
        """Every layer finds the scratch as the first one did."""
        plan = self.plan()
        layers = [paged_attention(self.q, self.kv, plan, Scoring(SCALE)) for _ in range(2)]
        torch.testing.assert_close(layers[0].double(), self.expected(), atol=2e-6, rtol=1e-5)
        assert torch.equal(*layers)


def check_captured(*cases):
    """Capture a step of the first case, and replay it with the inputs of the others."""
    static = cases[0]
    static.kv = static.kv.new_empty(max(len(case.kv) for case in cases), *static.kv.shape[1:])
    static.page_ids = static.page_ids.new_zeros(max(len(case.page_ids) for case in cases))
    static.attend()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static.attend()
    for case in cases[1:]:
        static.kv[: len(case.kv)] = case.kv
        static.page_ids[: len(case.page_ids)] = case.page_ids
        for name in ("q", "page_starts", "lengths"):
            getattr(static, name).copy_(getattr(case, name))
        graph.replay()
        torch.testing.assert_close(out.double(), case.expected(), atol=2e-3, rtol=2e-3)


def _layer(num_pages, kv_heads, page_size, head_dim, dtype, enveloped, vectors):
    """Return one layer of a pool of page envelopes, or of one that keeps every layer, K and V
    apart."""
    if enveloped:
        shape = (num_pages, kv_heads, NUM_LAYERS, vectors, page_size, head_dim)
        return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)[:, :, 1]
    shape = (NUM_LAYERS, vectors, num_pages, page_size, kv_heads, head_dim)
    return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)[1].permute(1, 3, 0, 2, 4)


def _in_8_bits(layer, kept_in):
    """Return the same in a pool of 8-bit numbers, in which 0x7f is NaN."""
    size = layer.untyped_storage().nbytes() // layer.element_size()
    pool = torch.full((size,), 0x7F, dtype=torch.uint8, device=DEVICE)
    own = pool.as_strided(layer.shape, layer.stride(), layer.storage_offset())
    own.copy_(layer.to(kept_in).view(torch.uint8))
    return own.view(kept_in)


def _ints(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
