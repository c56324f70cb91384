"""Latents: attention to what is key and value at once, and the write of it into pages."""

import math

import pytest
import torch

from kernels import device
from kernels.attention import extend as extend_attention
from kernels.attention import paged, split_kv, split_plan, unfolded
from kernels.attention.extend import AttentionTile
from kernels.attention.unfolded import MaskExpansion, plan_unfolded
from kernels.layers.rope import rope_angles
from kernels.pages.store_latents import rope_and_store_latents
from tests.kernels.attention_case import SCALE, Case
from tests.kernels.conftest import DEVICE

# Chunks, one with what is cached and one without; then decode rows, and padding.
ROWS = [(21, 21), (17, 90), (1, 3), (1, 0), (1, 100), (1, 64)]
SHAPE = {"heads": 6, "kv_heads": 1, "head_dim": 40, "value_dim": 32}
PAGE_SIZE, EPS = 4, 0.03  # so large that it shows


@pytest.fixture
def by_kernels(monkeypatch):
    monkeypatch.setattr(device, "uses_triton", lambda tensor: True)


@pytest.mark.parametrize(
    "heads, head_dim, value_dim", [(6, 40, 32), (1, 24, 16), (36, 30, 24)], ids=str
)
def test_every_head_attends_to_the_same_latents(implementation, heads, head_dim, value_dim):
    shape = {"heads": heads, "head_dim": head_dim, "value_dim": value_dim}
    Case(ROWS, **SHAPE | shape).check()


@pytest.mark.parametrize("enveloped", [True, False])
def test_pages_of_any_size_in_bfloat16(implementation, enveloped):
    case = Case(ROWS, **SHAPE, page_size=64, dtype=torch.bfloat16, enveloped=enveloped)
    case.check(atol=2e-2, rtol=2e-2)


def test_heads_are_divided_among_programs(monkeypatch, by_kernels):
    """Divide chunks and decode rows among many programs, whose results are combined by parts of
    their heads."""
    monkeypatch.setattr(paged, "LATENT_HEADS", 4)
    monkeypatch.setattr(
        extend_attention, "_tile", lambda *size, **kinds: AttentionTile(16, 16, 4, 2, 0)
    )
    monkeypatch.setattr(split_plan, "_tile", lambda *size, **kind: split_plan.SplitTile(16))
    monkeypatch.setattr(split_plan, "MIN_TILES", 1)
    monkeypatch.setattr(split_kv, "COMBINE_NUMBERS", 2 * 32)
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: 20)
    case = Case(ROWS, **SHAPE | {"heads": 12})
    assert paged.latents_as_heads(case.kv, 12).shape[1:3] == (6, 2)
    case.check()


@pytest.mark.parametrize(
    "shape",
    [{"value_dim": 40}, {"head_dim": 600, "value_dim": 513}, {"head_dim": 300, "value_dim": 16}],
    ids=str,
)
def test_latents_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="latents"):
        Case(ROWS, **SHAPE | shape).plan()


def test_keys_and_values_are_no_latents():
    case = Case(ROWS, kv_heads=1)
    with pytest.raises(ValueError, match="latents"):
        case.plan(value_dim=4)
    with pytest.raises(ValueError, match="2, page_size"):
        Case(ROWS, **SHAPE).plan(value_dim=None)


def turned(x, angles, interleaved):
    """[heads, 2 * pairs] in float64, as complex numbers."""
    x = x.double()
    first, second = (x[:, 0::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=-1)
    numbers = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((numbers.real, numbers.imag), dim=-1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "heads, value_dim, pairs, dtype, tolerance",
    [
        (3, 24, 4, torch.float32, 1e-5),
        (5, 16, 3, torch.float32, 1e-5),
        (130, 24, 4, torch.bfloat16, 2e-2),
    ],
)
def test_latents_are_normed_keys_and_queries_turned_and_nothing_else_is_written(
    implementation, heads, value_dim, pairs, dtype, tolerance, interleaved
):
    locations = [5, -1, 14, 0]
    num_tokens, size = len(locations), value_dim + 2 * pairs
    kv = torch.randn(num_tokens, size + 3, device=DEVICE).to(dtype)[:, 3:]
    q = torch.randn(num_tokens, heads, size, device=DEVICE).to(dtype)
    norm = torch.randn(value_dim, device=DEVICE).to(dtype)
    positions = torch.tensor([3, 0, 700, 12], dtype=torch.int32, device=DEVICE)
    frequencies = torch.rand(pairs, device=DEVICE)
    pool = torch.full((6, 2, PAGE_SIZE, size), math.nan, dtype=dtype, device=DEVICE)
    latents = pool[:, 1].view(6, 1, 1, PAGE_SIZE, size)
    out = torch.full((num_tokens, heads, size), math.nan, dtype=dtype, device=DEVICE)
    rope_and_store_latents(
        kv,
        norm,
        EPS,
        q[..., value_dim:],
        rope_angles(positions, frequencies, 1.0),
        latents,
        torch.tensor(locations, device=DEVICE),
        out[..., value_dim:],
        interleaved=interleaved,
    )
    assert out[..., :value_dim].isnan().all()
    for token, location in enumerate(locations):
        angles = (positions[token].float() * frequencies).double()
        found = [(out[token, :, value_dim:], turned(q[token, :, value_dim:], angles, interleaved))]
        if location >= 0:
            x = kv[token, :value_dim].double()
            normed = x / (x.square().mean() + EPS).sqrt() * norm.double()
            key = turned(kv[token : token + 1, value_dim:], angles, interleaved)[0]
            stored = pool[location // PAGE_SIZE, 1, location % PAGE_SIZE]
            found.append((stored, torch.cat((normed, key))))
        for actual, expected in found:
            torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    assert int((~pool.isnan()).sum()) == 3 * size


@pytest.mark.parametrize("wrong", ["kv", "q", "angles", "locations", "norm", "latents"])
def test_tensors_that_do_not_fit_are_refused(wrong):
    arguments = {
        "kv": torch.zeros(2, 24),
        "norm": torch.zeros(16),
        "q": torch.zeros(2, 3, 8),
        "angles": torch.zeros(2, 2, 4),
        "latents": torch.zeros(4, 1, 1, PAGE_SIZE, 24),
        "locations": torch.zeros(2, dtype=torch.int64),
    }
    arguments[wrong] = arguments[wrong][..., 1:]
    out = torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match=wrong):
        rope_and_store_latents(**arguments, eps=EPS, out=out, interleaved=True)


HEADS, KEY, ROTATED, RANK, VALUE = 6, 12, 8, 32, 16


class Chunks:
    """A case of latents of which each head makes its own keys and values."""

    def __init__(self, rows, dtype=torch.float32):
        size = {"heads": HEADS, "head_dim": RANK + ROTATED, "value_dim": RANK}
        self.case = Case(rows, kv_heads=1, page_size=16, dtype=dtype, **size)
        self.unfolding = MaskExpansion(
            torch.randn(HEADS, KEY, RANK).to(dtype) / 6, torch.randn(HEADS, RANK, VALUE).to(dtype)
        )
        self.q = torch.randn(len(self.case.q), HEADS, KEY + ROTATED).to(dtype)

    def plan(self):
        case = self.case
        rows = (case.page_ids, case.page_starts, case.query_starts, case.lengths)
        return plan_unfolded(*rows, case.kv, self.unfolding)

    def expected(self):
        """By latents as they are, in float64."""
        keys, values = (each.double() for each in (self.unfolding.keys, self.unfolding.values))
        q = self.q.double()
        turned = torch.einsum("nhk,hkr->nhr", q[..., :KEY], keys)
        self.case.q = torch.cat((turned, q[..., KEY:]), dim=2)
        seen = self.case.expected().view(len(q), HEADS, RANK)
        return torch.einsum("nhr,hrv->nhv", seen, values)


@pytest.mark.parametrize("at_once", [1, 1 << 30], ids=["head by head", "all heads"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("implementation", ["reference", "compiled"], indirect=True)
def test_chunks_attend_alike_by_the_keys_and_values_of_latents(
    monkeypatch, implementation, dtype, tolerance, at_once
):
    monkeypatch.setattr(unfolded, "MOST_BYTES", at_once)
    # Of more queries than share a mask, of one, and with a last page that is not full.
    chunks = Chunks([(300, 300), (270, 333), (1, 40), (33, 64)], dtype)
    plan = chunks.plan()
    assert plan is not None and plan.num_tokens == 604
    actual = plan.attend(chunks.q, chunks.case.kv, chunks.unfolding, scale=SCALE)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), chunks.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "rows, pays",
    [
        ([(128, 128)], True),
        ([(1, 1)], True),
        ([(96, 10_000)], True),
        ([(16, 10_000)], False),
        ([(16, 10_000), (512, 512)], False),
        ([(16, 1000), (512, 512)], True),
    ],
    ids=str,
)
def test_keys_and_values_are_made_where_that_is_less_work(rows, pays):
    """By the sizes of DeepSeek: what is cached must be unfolded for each chunk anew."""
    unfolding = MaskExpansion(torch.empty(16, 128, 512), torch.empty(16, 512, 128))
    assert unfolding.pays(rows) is pays


def test_kernels_attend_to_latents_as_they_are(by_kernels):
    assert Chunks([(64, 64)]).plan() is None
