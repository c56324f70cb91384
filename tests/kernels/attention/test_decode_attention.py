"""The division of decode rows among programs, which changes no output."""

import pytest
import torch
from triton.runtime.jit import KernelInterface

from kernels import device
from kernels.attention import split_kv, split_plan
from kernels.attention.arguments import Scoring
from kernels.attention.paged import paged_attention
from tests.kernels.attention.attention_case import SCALE, Case, check_captured

pytestmark = pytest.mark.usefixtures("by_kernels")

# A long row among short ones, lengths around tiles of 64 keys, padding.
SKEWED = [(1, 3), (1, 0), (1, 700), (1, 64), (1, 65), (1, 0), (1, 130)]


@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize("multiprocessors, min_tiles", [(1, 1), (3, 1), (3, 4), (40, 1), (40, 2)])
def test_rows_are_split_among_any_number_of_programs(
    monkeypatch, multiprocessors, min_tiles, window
):
    """From all rows in one program to one program for each tile."""
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(split_plan, "PROGRAMS_PER_MULTIPROCESSOR", 1)
    monkeypatch.setattr(split_plan, "MIN_TILES", min_tiles)
    Case(SKEWED, heads=3, kv_heads=1, page_size=64).check(window)


def test_rows_of_many_partial_results_are_combined_block_by_block(monkeypatch):
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: 40)
    monkeypatch.setattr(split_plan, "MIN_TILES", 1)
    monkeypatch.setattr(split_kv, "COMBINE_NUMBERS", 4 * 2 * 32)
    case = Case(SKEWED, heads=2, kv_heads=1, head_dim=24)
    case.q *= 20  # so that one key in some block outweighs all others
    case.check()


def test_plans_and_searches_process_the_rows_block_by_block(monkeypatch):
    monkeypatch.setattr(split_plan, "PLAN_BLOCK", 4)
    monkeypatch.setattr(split_kv, "SEARCH_BLOCK", 2)
    Case([(9, 9), *SKEWED, (1, 1), (1, 66)], heads=1, kv_heads=1).check()


def test_a_long_row_is_distributed_over_all_programs(monkeypatch):
    """22 tiles in pairs, 20 of which belong to the long row: 11 programs write a part of it. The
    first and the last program also have another complete row, which needs no partial result."""
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: 12)
    monkeypatch.setattr(split_plan, "PROGRAMS_PER_MULTIPROCESSOR", 1)
    case = Case([(1, 64), (1, 64 * 20), (1, 64)], heads=1, kv_heads=1)
    plan = case.plan()
    paged_attention(case.q, case.kv, plan, Scoring(SCALE))
    results = ~plan.splits[0].logs.isnan()
    assert results.sum() == 11


def test_a_row_of_a_single_program_has_no_partial_result(monkeypatch):
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: 1)
    monkeypatch.setattr(split_plan, "PROGRAMS_PER_MULTIPROCESSOR", 1)
    case = Case(SKEWED, heads=2, kv_heads=1)
    plan = case.plan()
    out = paged_attention(case.q, case.kv, plan, Scoring(SCALE))
    assert not out.isnan().any()
    assert plan.splits[0].logs.isnan().all()


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (2, 2)])
def test_every_layer_finds_the_scratch_memory_unchanged(monkeypatch, heads, kv_heads):
    """If a count of parts were not reset, rows of the next layer would not be written."""
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: 40)
    monkeypatch.setattr(split_plan, "MIN_TILES", 1)
    Case(SKEWED, heads=heads, kv_heads=kv_heads).check_layers_of_one_plan()


def test_a_window_drops_the_tiles_before_it():
    plan = Case([(1, 64), (1, 65), (1, 640), (1, 0)], page_size=32).plan(window=64).splits[0]
    assert plan.tile_starts.tolist() == [0, 1, 3, 4, 5]  # padding has one, of no keys


def test_a_plan_needs_no_data_of_the_device(monkeypatch):
    """A read would wait for the device, and a captured graph would be wrong for other lengths."""
    launches = []

    def launch(kernel, grid):
        return lambda *args, **kwargs: launches.append(grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    case = Case([(200, 209), (1, 40), (1, 3)])
    for name in ("q", "kv", "page_ids", "page_starts", "query_starts", "lengths"):
        setattr(case, name, getattr(case, name).to("meta"))  # has shapes and no numbers
    assert case.attend().shape == case.q.flatten(1).shape
    assert len(launches) == 3  # plan, whole rows, split rows


@pytest.mark.gpu
def test_a_captured_step_is_right_for_other_lengths_and_pages():
    cases = [
        Case([(1, length) for length in lengths], head_dim=128, dtype=torch.float16)
        for lengths in ([1, 1, 1, 0, 0], [5000, 3, 64, 65, 1], [130, 129, 2000, 0, 0])
    ]
    check_captured(*cases)
