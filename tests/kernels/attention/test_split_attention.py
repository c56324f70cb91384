"""Rows with several queries whose keys are divided among programs: which rows are divided, and
results."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from kernels import device
from kernels.attention import paged, split_kv, split_plan
from kernels.attention.arguments import AttentionKind
from kernels.attention.split_plan import (
    busy_programs,
    first_tile,
    lanes_of_items,
    plan_split,
    program_of,
)
from tests.kernels.attention.attention_case import Case, check_captured
from tests.kernels.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("by_kernels")

H200 = 132  # multiprocessors
BLOCK = 512
# Rows that verify drafts, some of which have more queries than an item, a row without a draft, and
# padding. Lengths are around tiles of 64 keys.
VERIFIED = [(4, 4), (5, 700), (2, 65), (9, 130), (3, 64), (1, 0), (1, 200)]
MORE = (16, 1), (16, 20), (64, 1)  # lanes and multiprocessors of `make test-long`


def split(monkeypatch, lanes, multiprocessors, min_tiles=1):
    monkeypatch.setattr(paged, "lanes_of_items", lambda *sizes, **kinds: lanes)
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(split_plan, "MIN_TILES", min_tiles)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    "lanes, multiprocessors",
    [(16, 3), (64, 9), *(pytest.param(*more, marks=pytest.mark.long) for more in MORE)],
)
def test_rows_with_several_queries_are_split_among_any_number_of_programs(
    monkeypatch, lanes, multiprocessors, window
):
    """From all rows in two programs to one program for each tile. 64 lanes have tiles without a
    mask."""
    split(monkeypatch, lanes, multiprocessors)
    case = Case(VERIFIED, heads=3, kv_heads=1, page_size=32)
    case.check(window)
    sinks = torch.tensor([-1.0, 0.5, 30.0], device=DEVICE)
    case.check(window, 2.0, sinks, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("multiprocessors", [1, 20])
def test_items_of_one_program_and_combined_ones_are_gated(monkeypatch, multiprocessors):
    split(monkeypatch, 16, multiprocessors)
    Case(VERIFIED, heads=3, kv_heads=1, head_dim=24).check_gated()


def test_a_lane_that_sees_no_key_of_a_part_gets_nothing_from_it(monkeypatch):
    """The window of an item's last query starts some tiles after that of its first one, and the
    first query ends some tiles before the last one."""
    split(monkeypatch, 16, 40)
    monkeypatch.setattr(split_plan, "_tile", lambda *size, **kind: split_plan.SplitTile(16))
    monkeypatch.setattr(split_kv, "COMBINE_NUMBERS", 16 * 16)  # a part at a time
    case = Case([(16, 200), (16, 20)], heads=1, kv_heads=1)
    case.check(3)
    case.check()


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (4, 1)])
def test_every_layer_finds_the_scratch_memory_unchanged(monkeypatch, heads, kv_heads):
    split(monkeypatch, 16, 40)
    Case(VERIFIED, heads=heads, kv_heads=kv_heads).check_layers_of_one_plan()


@pytest.mark.parametrize("rows", [[(2, 9), (0, 5)], [(0, 5), (2, 70), (0, 3), (3, 3)]], ids=str)
def test_rows_without_queries_have_no_items(monkeypatch, rows):
    split(monkeypatch, 16, 4)
    Case(rows, heads=16, kv_heads=1).check()


def test_plans_process_items_and_rows_block_by_block(monkeypatch):
    split(monkeypatch, 16, 3)
    monkeypatch.setattr(split_plan, "ITEM_BLOCK", 2)
    monkeypatch.setattr(split_plan, "ROW_BLOCK", 2)
    monkeypatch.setattr(split_kv, "SEARCH_BLOCK", 2)
    Case([(20, 20), (0, 9), *VERIFIED], heads=4, kv_heads=1).check()


def test_prompts_that_leave_the_device_idle_are_divided_beside_decode_rows(monkeypatch):
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: H200)
    case = Case([(70, 300), (1, 150), (1, 3)], heads=4, kv_heads=2, dtype=torch.float16)
    plan = case.plan()
    assert [split.lanes for split in plan.splits] == [64, 16]
    case.check(atol=2e-3, rtol=2e-3)
    case.check(100, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "rows, queries, group, expected",
    [
        (1, 4, 4, 16),  # a verify step of one row
        (64, 256, 4, 16),
        (64, 320, 4, 64),  # one query more for each row
        (1, 64, 4, 64),  # few new tokens after a prefix
        (1, 400, 4, 64),
        (1, 600, 4, None),  # 19 tiles of 8 heads
        (64, 2048, 4, None),
        (1, 4, 16, 64),
    ],
)
def test_keys_are_divided_if_whole_rows_would_leave_the_device_idle(rows, queries, group, expected):
    shape = {"group": group, "kv_heads": 8, "head_dim": 128, "element_size": 2}
    assert lanes_of_items(rows, queries, **shape, multiprocessors=H200) == expected


def test_items_of_wide_numbers_or_latents_have_only_the_lanes_of_one_query():
    for head_dim, element_size in ((256, 2), (128, 4), (576, 2)):
        shape = {"group": 4, "kv_heads": 8, "head_dim": head_dim, "element_size": element_size}
        assert lanes_of_items(1, 64, **shape, multiprocessors=H200) == 16


@triton.jit
def ranges_kernel(tile_starts_ptr, num_items, num_programs, out_ptr, MIN: tl.constexpr):
    """Store how many programs are busy, their first tiles, the end, and their rows."""
    programs = tl.arange(0, BLOCK_OF_RANGES)
    num_tiles = tl.load(tile_starts_ptr + num_items)
    busy = busy_programs(num_tiles, num_programs, MIN)
    tiles = first_tile(programs, num_tiles, busy)
    tl.store(out_ptr, busy)
    tl.store(out_ptr + 1 + programs, tiles)
    tl.store(out_ptr + 1 + BLOCK_OF_RANGES + programs, program_of(tiles, num_tiles, busy))


BLOCK_OF_RANGES: tl.constexpr = tl.constexpr(BLOCK)


def first_tiles(monkeypatch, lengths, drafts, heads, kv_heads):
    """Return the first tile of each busy program of a KV head and the end of the last one's."""
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: H200)
    kv = torch.empty(1, kv_heads, 2, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    rows = len(lengths)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * (1 + drafts)
    plan = plan_split(
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        kv,
        rows,
        rows * (1 + drafts),
        kind=AttentionKind(heads),
        lanes=16,
        query_starts=starts if drafts else None,
    )
    out = torch.empty(1 + 2 * BLOCK, dtype=torch.int32, device=DEVICE)
    ranges_kernel[(1,)](plan.tile_starts, plan.num_items, plan.num_programs, out, plan.min_tiles)
    busy = int(out[0])
    tiles, programs = out[1 : 2 + busy].tolist(), out[1 + BLOCK :][:busy].tolist()
    assert programs == [*range(busy)]
    assert tiles[0] == 0 and tiles[-1] == plan.tile_starts[-1]
    return tiles


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (64, 8), (16, 16)])
def test_contexts_above_8k_have_two_programs_for_each_multiprocessor(
    monkeypatch, heads, kv_heads, rows, drafts
):
    """Even for one row. Programs differ by at most one tile."""
    for context in (8193, 10000, 8448, 16384, 32768 + 65, 131072):
        tiles = first_tiles(monkeypatch, [context] * rows, drafts, heads, kv_heads)
        assert (len(tiles) - 1) * kv_heads >= 2 * H200
        sizes = {end - start for start, end in itertools.pairwise(tiles)}
        assert max(sizes) - min(sizes) <= 1


def test_short_contexts_have_programs_of_two_tiles(monkeypatch):
    assert first_tiles(monkeypatch, [1024], 3, 32, 8) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert first_tiles(monkeypatch, [3, 5], 0, 32, 8) == [0, 2]


def test_one_long_row_leaves_no_program_to_short_ones_alone(monkeypatch):
    tiles = first_tiles(monkeypatch, [131072, *[200] * 31], 3, 32, 8)
    assert len(tiles) - 1 == 33
    assert max(end - start for start, end in itertools.pairwise(tiles)) == 66


@pytest.mark.gpu
def test_a_captured_verify_step_is_right_for_other_lengths_and_pages():
    cases = [
        Case([(4, length) for length in lengths], heads=8, head_dim=128, dtype=torch.float16)
        for lengths in ([4, 4, 4], [5000, 9, 64], [130, 129, 2000])
    ]
    check_captured(*cases)
