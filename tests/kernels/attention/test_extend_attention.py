"""The extend kernel's tiles of queries, heads and keys, and the tiles that need a mask."""

import pytest
import torch

from kernels.attention import extend as extend_attention
from kernels.attention import paged
from kernels.attention.extend import AttentionTile
from tests.kernels.attention.attention_case import Case


@pytest.fixture(autouse=True)
def _whole_rows(by_kernels, monkeypatch):
    monkeypatch.setattr(paged, "lanes_of_items", lambda *sizes, **kinds: None)


@pytest.mark.parametrize("group, window", [(1, None), (1, 1), (1, 16), (3, None), (3, 5), (3, 40)])
def test_tiles_of_queries_and_keys_overlap_in_every_way(monkeypatch, group, window):
    """Tiles of 16 lanes and 16 keys. Rows have one query less and more than one or two tiles,
    with prefixes that end before, at and after the boundary of a page and of a tile."""
    monkeypatch.setattr(
        extend_attention, "_tile", lambda *sizes, **kinds: AttentionTile(16, 16, 4, 2, 0)
    )
    rows = [(31, 31), (17, 48), (16, 33), (15, 30), (1, 40), (5, 5), (4, 37)]
    Case(rows, heads=group, kv_heads=1, page_size=32).check(window)


@pytest.mark.parametrize(
    "sharpness, window, soft_cap, atol",
    [
        (1, None, None, 2e-6),
        (1000, None, None, 5e-3),
        (1000, 25, None, 5e-3),
        (30, None, 40.0, 2e-5),
    ],
)
def test_sums_are_rescaled_when_a_score_is_much_larger_than_earlier_ones(
    monkeypatch, sharpness, window, soft_cap, atol
):
    """Scores rise by less than the tolerance of 2 ** 8, and by more than float32 can represent,
    in some tiles and for some of their rows."""
    monkeypatch.setattr(
        extend_attention, "_tile", lambda *sizes, **kinds: AttentionTile(16, 16, 4, 2, 8)
    )
    case = Case([(17, 90), (20, 20), (3, 40)], heads=2, kv_heads=1)
    case.q *= sharpness
    case.check(window, soft_cap, atol=atol)


@pytest.mark.parametrize("page_size", [16, 128])
def test_a_tile_of_keys_spans_several_pages_or_part_of_one(page_size):
    case = Case([(100, 230), (2, 129)], head_dim=16, page_size=page_size, dtype=torch.float16)
    case.check(atol=2e-3, rtol=2e-3)
    case.check(70, atol=2e-3, rtol=2e-3)


def test_searches_process_the_rows_block_by_block(monkeypatch):
    monkeypatch.setattr(extend_attention, "SEARCH_BLOCK", 2)
    Case([(9, 9), (40, 50), (2, 2), (3, 20), (7, 7)], heads=2, kv_heads=1).check()


def test_more_query_heads_for_a_kv_head_than_lanes_are_rejected():
    with pytest.raises(ValueError, match="at most 32 query heads"):
        Case([(2, 2)], heads=33, kv_heads=1).attend()
