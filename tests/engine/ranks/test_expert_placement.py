"""Placement of experts on ranks: balanced loads, replicas on different ranks, and few moves."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config import ParallelConfig
from common.errors import ConfigError
from engine.models.blocks.placed_experts import PlacedExperts
from engine.ranks.expert_placement import (
    ExpertPlacement,
    LayerSlots,
    balanced,
    imbalance,
    num_moved,
    rank_loads,
    slot_table,
)

SKEWED = [12, 13, 25, 50, 100, 200, 400, 800]  # tokens of 8 experts, half of them of the last one


def first_slots(count: int, redundant: int, size: int) -> LayerSlots:
    return ExpertPlacement(size, redundant, counts_tokens=True).slots("", count)


def check_slots(slots: LayerSlots, like: LayerSlots) -> None:
    assert list(map(len, slots)) == list(map(len, like))
    assert all(len(set(rank)) == len(rank) for rank in slots), "replicas are on different ranks"
    assert set().union(*slots) == set().union(*like), "every expert is somewhere"


@pytest.mark.parametrize(
    ("redundant", "size", "before", "after"),
    [
        (0, 2, 1.875, 1.0625),
        (2, 2, 1.765625, 1.03125),
        (0, 4, 3.0, 2.03),  # one rank has the last expert, with half of all tokens
        (4, 4, 3.015, 1.0625),
    ],
)
def test_skewed_tokens_are_balanced(redundant: int, size: int, before: float, after: float) -> None:
    """The largest load of a rank divided by the mean load."""
    present = first_slots(8, redundant, size)
    wanted = balanced(SKEWED, present)
    check_slots(wanted, present)
    assert imbalance([SKEWED], [present]) == pytest.approx(before)
    assert imbalance([SKEWED], [wanted]) == pytest.approx(after)


def test_layers_are_weighted_by_their_largest_load() -> None:
    slots = ((0,), (1,))
    assert imbalance([[30, 10], [10, 10]], [slots, slots]) == pytest.approx((30 + 10) / (20 + 10))
    assert imbalance([[0, 0]], [slots]) == 1.0


def test_random_tokens_are_balanced_and_no_load_gets_worse() -> None:
    random.seed(0)
    for _ in range(300):
        size, count = random.choice([2, 3, 4, 8]), random.randrange(8, 33)
        redundant = (-count) % size + size * random.randrange(min(4, (size - 1) * count // size))
        present = first_slots(count, redundant, size)
        for _ in range(3):
            counts = [int(random.paretovariate(0.7)) for _ in range(count)]
            wanted = balanced(counts, present)
            check_slots(wanted, present)
            assert wanted == balanced(counts, present), "all calls give the same"
            assert max(rank_loads(counts, wanted)) <= max(rank_loads(counts, present))
            assert sum(rank_loads(counts, wanted)) == pytest.approx(sum(counts))
            present = wanted


def test_late_replicas_find_a_rank() -> None:
    """The ranks with free slots have the expert already."""
    counts = [100, 10, 10, 10, 1]
    present = ((0, 1, 2), (3, 4, 0))
    check_slots(balanced(counts, present), present)


def test_experts_stay_if_other_ranks_are_hardly_better() -> None:
    present = ((0, 1), (2, 3))
    assert balanced([10, 10, 10, 10], present) == present
    assert balanced([0, 0, 0, 0], present) == present
    assert balanced([103, 100, 100, 100], present) == present


def test_few_experts_move() -> None:
    present = ((0, 1), (2, 3), (4, 5))
    wanted = balanced([90, 80, 10, 10, 50, 50], present)
    assert rank_loads([90, 80, 10, 10, 50, 50], wanted) == [100, 90, 100]
    assert num_moved(present, wanted) == 2  # an expert of the first and one of the second rank
    assert wanted[2] == (4, 5)


@pytest.mark.parametrize(("count", "redundant", "size"), [(8, 0, 2), (8, 4, 4), (12, 9, 3)])
def test_one_rank_computes_each_pair(count: int, redundant: int, size: int) -> None:
    slots = balanced([2**n for n in range(count)], first_slots(count, redundant, size))
    tables = [slot_table(slots, rank, count) for rank in range(size)]
    loads = [0.0] * size
    for row in range(size):
        for expert in range(count):
            owners = [rank for rank in range(size) if tables[rank][row][expert] < len(slots[rank])]
            assert len(owners) == 1
            assert slots[owners[0]][tables[owners[0]][row][expert]] == expert
            loads[owners[0]] += 2**expert / size
    assert loads == pytest.approx(rank_loads([2**n for n in range(count)], slots))


def test_tokens_of_each_expert_are_counted() -> None:
    """This includes tokens whose expert is computed by another rank."""
    slots, seen = ((0, 1), (2, 0)), []

    def apply(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        seen.append((weights, ids))
        return x

    net: Any = SimpleNamespace(apply=apply)
    table = torch.tensor(slot_table(slots, 0, 3), dtype=torch.int32)
    shape: Any = None
    experts = PlacedExperts("", shape, net, 2, table, torch.zeros(3, dtype=torch.int64))
    ids = torch.tensor([[0, 1], [0, 2], [1, 2]], dtype=torch.int32)
    for _ in range(2):
        experts.apply(torch.zeros(3, 4), torch.full((3, 2), 0.5), ids)
    assert experts.counts is not None and experts.counts.tolist() == [4, 4, 4]
    weights, places = seen[0]
    assert places.dtype == torch.int32 and places.tolist() == [[0, 1], [2, 2], [1, 2]]
    assert weights.tolist() == [[0.5, 0.5], [0, 0], [0.5, 0]]


def test_replicas_share_single_tokens_of_decode_steps() -> None:
    """The first token of a step does not always use the first replica."""
    table = slot_table(((0, 1), (0, 1)), 0, 2)
    assert table[0] == [0, 2] and table[1] == [2, 1]


@pytest.mark.parametrize(
    ("count", "redundant", "size", "why"),
    [
        (8, 1, 2, "8 experts and 1 replicas cannot have equal numbers of slots on 2 ranks"),
        (6, 0, 4, "6 experts and 0 replicas cannot have equal numbers of slots on 4 ranks"),
        (4, 8, 2, "2 ranks cannot have more than 4 replicas of 4 experts"),
    ],
)
def test_unequal_slots_are_rejected(count: int, redundant: int, size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.parallel\.redundant_experts: {why}"):
        first_slots(count, redundant, size)


@pytest.mark.parametrize("setting", ["redundant_experts", "rebalance_steps"])
def test_settings_without_whole_experts_are_rejected(setting: str, tmp_path) -> None:
    on = {setting: 2}
    for parallel in ({}, {"tp": 2}, {"experts": "ep"}):
        with pytest.raises(ValueError, match=f"{setting} needs experts ep and a tp of 2 or more"):
            ParallelConfig(**parallel, **on)
    for parallel in ({"tp": 2, "experts": "ep", "pp": 2}, {"dp": 2, "dp_group": tmp_path}):
        with pytest.raises(ValueError, match=f"{setting} is not supported together with dp or pp"):
            ParallelConfig(**parallel, **on)
    assert ExpertPlacement.of(ParallelConfig(tp=2, experts="ep")) is None
