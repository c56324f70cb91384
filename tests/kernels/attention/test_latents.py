"""Latents: attention to one vector that is key and value, and writing it into pages."""

import math
from dataclasses import replace

import pytest
import torch

from kernels import device
from kernels.attention import expand_latents, expanded, paged, split_kv, split_plan
from kernels.attention import extend as extend_attention
from kernels.attention.expand_latents import ExpandedRows, _ExpansionTile
from kernels.attention.expanded import plan_expanded
from kernels.attention.expansion import TILE_TOKENS, LatentExpansion
from kernels.attention.extend import AttentionTile
from kernels.layers.rope import rope_angles
from kernels.pages.store_latents import rope_and_store_latents
from tests.kernels.attention.attention_case import SCALE, Case
from tests.kernels.conftest import DEVICE

# Chunks, one with a cached prefix and one without, then decode rows, and padding.
ROWS = [(21, 21), (17, 90), (1, 3), (1, 0), (1, 100), (1, 64)]
SHAPE = {"heads": 6, "kv_heads": 1, "head_dim": 40, "value_dim": 32}
PAGE_SIZE, EPS = 4, 0.03  # so large that it has a visible effect


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


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "heads, dtype, tolerance", [(64, torch.bfloat16, 2e-2), (36, torch.float16, 2e-3)], ids=str
)
def test_one_program_may_have_many_heads(
    monkeypatch, by_kernels, heads, dtype, tolerance, page_size
):
    """Chunks and decode rows over complete and partial tiles, and with several pages in a tile."""
    case = Case([*ROWS, (1, 200)], **SHAPE | {"heads": heads}, dtype=dtype, page_size=page_size)
    assert paged.latents_as_heads(case.kv, heads).shape[1] == 1
    case.check(atol=tolerance, rtol=tolerance)


def test_heads_are_divided_among_programs(monkeypatch, by_kernels):
    """Chunks and decode rows are divided among many programs, whose results are combined by
    groups of their heads."""
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
def test_latents_of_other_shapes_are_rejected(shape):
    with pytest.raises(ValueError, match="latents"):
        Case(ROWS, **SHAPE | shape).plan()


def test_keys_and_values_are_no_latents():
    case = Case(ROWS, kv_heads=1)
    with pytest.raises(ValueError, match="latents"):
        case.plan(value_dim=4)
    with pytest.raises(ValueError, match="2, page_size"):
        Case(ROWS, **SHAPE).plan(value_dim=None)


def turned(x, angles, interleaved):
    """Return [heads, 2 * pairs] in float64, rotated as complex numbers."""
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
def test_latents_are_normalized_keys_and_queries_rotated_and_no_other_byte_written(
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
def test_tensors_that_do_not_fit_are_rejected(wrong):
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


HEADS, KEY, ROTATED, RANK, VALUE = 3, 12, 8, 32, 16


class Chunks:
    """A case of latents that each head expands to its own keys and values."""

    def __init__(self, rows, dtype=torch.float32, kept_in=None):
        size = {"heads": HEADS, "head_dim": RANK + ROTATED, "value_dim": RANK}
        self.case = Case(rows, kv_heads=1, page_size=16, dtype=dtype, kept_in=kept_in, **size)
        self.expansion = LatentExpansion(
            torch.randn(HEADS, KEY, RANK).to(dtype) / 6, torch.randn(HEADS, RANK, VALUE).to(dtype)
        )
        self.q = torch.randn(len(self.case.q), HEADS, KEY + ROTATED).to(dtype)

    def plan(self):
        case = self.case
        rows = replace(case.step, num_decodes=0)
        return plan_expanded(rows, case.kv, self.expansion, case.rows)

    def attended(self, plan):
        out = torch.full((*self.q.shape[:2], VALUE), math.nan, dtype=self.q.dtype)
        plan.attend(self.q, self.case.kv, self.expansion, out, scale=SCALE)
        return out

    def expected(self):
        """Compute with latents directly, in float64."""
        keys, values = (each.double() for each in (self.expansion.keys, self.expansion.values))
        q = self.q.double()
        turned = torch.einsum("nhk,hkr->nhr", q[..., :KEY], keys)
        self.case.q = torch.cat((turned, q[..., KEY:]), dim=2)
        seen = self.case.expected().view(len(q), HEADS, RANK)
        return torch.einsum("nhr,hrv->nhv", seen, values)


# With more queries than share a mask, with one, and with an incomplete last page.
CHUNKS = [(300, 300), (270, 333), (1, 40), (33, 64)]


@pytest.mark.parametrize(
    "dtype, tolerance, at_once",
    [
        (torch.float32, 1e-5, 2),
        (torch.bfloat16, 6e-2, 1),
        pytest.param(torch.bfloat16, 6e-2, HEADS, marks=pytest.mark.long),
    ],
)
def test_chunks_give_the_same_result_with_expanded_keys_and_values(
    monkeypatch, implementation, dtype, tolerance, at_once
):
    monkeypatch.setattr(expanded, "MOST_BYTES", 1 if at_once == 1 else 1 << 30)
    monkeypatch.setattr(LatentExpansion, "heads_at_once", lambda *of: at_once)
    chunks = Chunks(CHUNKS, dtype)
    plan = chunks.plan()
    assert plan is not None and plan.num_tokens == 604
    expected = chunks.expected()
    actual = chunks.attended(plan)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_latents_in_8_bits_are_expanded(implementation):
    chunks = Chunks([(200, 240)], torch.bfloat16, kept_in=torch.float8_e4m3fn)
    actual = chunks.attended(chunks.plan())
    torch.testing.assert_close(actual.double(), chunks.expected(), atol=6e-2, rtol=6e-2)


@pytest.mark.parametrize(
    "key_dim, rotated, value_dim, rank", [(12, 8, 16, 32), (24, 3, 20, 40), (16, 16, 16, 96)]
)
def test_every_token_and_head_gets_its_key_and_value(
    monkeypatch, by_kernels, key_dim, rotated, value_dim, rank
):
    """Rows are longer than a tile, and two programs compute each tile."""
    monkeypatch.setattr(expand_latents, "_tile", lambda *of: _ExpansionTile(64, 32, 2))
    lengths, heads = [150, 3, 128], 3
    size = {"heads": heads, "head_dim": rank + rotated, "value_dim": rank}
    case = Case([(1, length) for length in lengths], kv_heads=1, page_size=16, **size)
    rows = ExpandedRows.of(case.page_ids, case.page_starts, case.lengths)
    keys, values = torch.randn(heads, key_dim, rank), torch.randn(heads, rank, value_dim)
    width = key_dim + rotated + value_dim
    out = torch.full((5, heads, TILE_TOKENS, width), math.nan)
    expand_latents.expand_latents(case.kv, rows, LatentExpansion(keys, values), out)
    assert rows.tile_starts.tolist() == [0, 2, 3, 4]
    for first, length, latents in zip([0, 2, 3], lengths, case.keys, strict=True):
        made = out[first:].transpose(0, 1).flatten(1, 2)[:, :length].double()
        own, others = latents[:, 0, :rank].double(), latents[:, 0, rank:].double()
        of_head = own @ keys.double().mT, others.expand(heads, -1, -1), own @ values.double()
        torch.testing.assert_close(made, torch.cat(of_head, dim=2), atol=2e-5, rtol=1e-5)
    assert out[4].isnan().all()  # a tile that no row has


@pytest.mark.parametrize("wrong", ["out", "latents", "expansion"])
def test_expansions_that_do_not_fit_are_rejected(wrong):
    case = Case([(1, 40)], kv_heads=1, heads=2, head_dim=40, value_dim=32)
    keys, out = torch.zeros(2, 12, 32), torch.zeros(1, 2, TILE_TOKENS, 12 + 8 + 16)
    kv = case.kv[..., :32] if wrong == "latents" else case.kv
    if wrong == "out":
        out = out[..., 1:]
    if wrong == "expansion":
        keys = torch.zeros(2, 32, 12).mT
    rows = ExpandedRows.of(case.page_ids, case.page_starts, case.lengths)
    own = LatentExpansion(keys, torch.zeros(2, 32, 16))
    with pytest.raises(ValueError, match=wrong):
        expand_latents.expand_latents(kv, rows, own, out)


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
def test_keys_and_values_are_expanded_if_that_is_less_work(rows, pays):
    """The sizes are those of DeepSeek. Each chunk expands the cached latents again."""
    expansion = LatentExpansion(torch.empty(16, 128, 512), torch.empty(16, 512, 128))
    assert expansion.pays(rows) is pays


@pytest.mark.parametrize(
    "heads, rows, pays",
    [
        (128, [(2048, 2048)], True),
        (128, [(2048, 32_768)], True),
        (128, [(256, 512)], True),
        (128, [(256, 65_536)], False),  # the expansion alone is more work
        (128, [(16, 16)] * 20, False),  # queries that leave tiles empty
        (128, [(4, 2000)] * 64, False),  # rows with drafts
        (16, [(2048, 8192)], True),
        (16, [(2048, 200_000)], False),  # few heads at a time do not occupy the device
        (128, [(128, 4_000_000)], False),  # not even one head fits
    ],
    ids=str,
)
def test_a_gpu_expands_latents_if_that_takes_less_time(heads, rows, pays):
    """The sizes are those of DeepSeek, in bfloat16."""
    assert _deepseek(heads).pays_on_gpu(rows, rotated=64, multiprocessors=132) is pays


@pytest.mark.parametrize("rows", [[(2048, 2048)], [(2048, 100_000)], [(128, 40_000)], [(1, 1)]])
def test_expanded_keys_and_values_have_a_size_limit_for_any_length(rows):
    """The limit is what attention over latents needs for the same queries, or 256 MiB."""
    expansion, tokens = _deepseek(128), sum(queries for queries, _ in rows)
    bound = expansion.workspace_bytes(tokens, 64)
    over_latents = tokens * 128 * (512 + 64 + 512) * 2
    assert bound == max(256 << 20, over_latents)
    at_once = expansion.heads_at_once(rows, 64)
    tiles = sum(-(-length // TILE_TOKENS) for _, length in rows)
    assert 0 < at_once * tiles * TILE_TOKENS * (128 + 64 + 128) * 2 <= bound


def _deepseek(heads):
    keys = torch.empty(heads, 128, 512, dtype=torch.bfloat16, device="meta")
    return LatentExpansion(keys, keys.mT)


@pytest.mark.parametrize("rows", [[(64, 64)], [(3, 40), (2, 17)]], ids=str)
def test_kernels_attend_to_latents_directly_from_few_queries(by_kernels, rows):
    assert Chunks(rows).plan() is None
