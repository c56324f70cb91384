"""Experts move while no step is running, and no step starts while they move."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import EngineFault
from engine.loop.rebalancing import ExpertBalancer, RebalancingRole
from engine.ranks.expert_placement import ExpertPlacement, balanced
from engine.runner.stream import WorkerStream

EVERY = 3
TOKENS = torch.tensor([80, 40, 2, 1])
EVEN = torch.tensor([10, 10, 10, 10])


class Weights:
    """Weights whose experts move when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.moved: Future[None] | None = Future()

    def move_experts(self, moves: Any) -> Future[None] | None:
        self.asked.append(moves)
        return self.moved


class Role:
    """A role that always has a batch."""

    def __init__(self) -> None:
        self.rests = 0

    def poll(self) -> None:
        pass

    def next_batch(self) -> Any:
        return "batch"

    def finish(self, batch: Any, result: Any) -> None:
        pass

    def idle(self) -> None:
        self.rests += 1


class Rebalanced:
    def __init__(self) -> None:
        self.counts = torch.full((4,), 1000)  # of the warm-up, which are dropped
        self.even = torch.zeros(4, dtype=torch.int64)
        layers: list[Any] = [
            SimpleNamespace(layer=name, shape=SimpleNamespace(count=4), counts=counts)
            for name, counts in {"even.": self.even, "layer.": self.counts}.items()
        ]
        self.stream, self.weights, self.inner = WorkerStream(), Weights(), Role()
        placement = ExpertPlacement(2, 0, counts_tokens=True)
        self.balancer = ExpertBalancer(layers, placement, self.weights, self.stream, EVERY)
        self.role = RebalancingRole(self.inner, self.balancer)

    def step(self) -> Any:
        """Launch a step and finish it."""
        self.counts += TOKENS
        self.even += EVEN
        batch = self.role.next_batch()
        if batch is not None:
            self.role.finish(batch, None)  # type: ignore[arg-type]
        return batch


@pytest.fixture
def rebalanced() -> Any:
    made = Rebalanced()
    yield made
    made.stream.close()


def test_steps_in_flight_end_before_experts_move(rebalanced: Any) -> None:
    role, weights = rebalanced.role, rebalanced.weights
    rebalanced.counts += TOKENS
    assert [role.next_batch() for _ in range(EVERY)] == ["batch"] * EVERY
    for _ in range(EVERY):
        assert role.next_batch() is None and not weights.asked
        role.finish("batch", None)
    assert role.next_batch() is None
    assert weights.asked == [{"layer.": balanced(TOKENS.tolist(), ((0, 1), (2, 3)))}]
    assert not rebalanced.counts.any()


def test_no_step_starts_while_experts_move(rebalanced: Any) -> None:
    for _ in range(EVERY):
        assert rebalanced.step() == "batch"
    assert rebalanced.step() is None
    rebalanced.role.idle()
    assert rebalanced.inner.rests == 0, "the role could end"
    rebalanced.weights.moved.set_result(None)
    assert rebalanced.step() == "batch"
    rebalanced.role.idle()
    assert rebalanced.inner.rests == 1
    assert rebalanced.balancer.num_moved == 2 and rebalanced.balancer.seconds > 0
    assert rebalanced.balancer.imbalance == pytest.approx((120 + 20) / (61.5 + 20))


def test_the_error_of_a_rank_is_raised(rebalanced: Any) -> None:
    rebalanced.weights.moved.set_exception(EngineFault("a rank failed"))
    for _ in range(EVERY):
        rebalanced.step()
    with pytest.raises(EngineFault, match="a rank failed"):
        rebalanced.step()


def test_experts_that_cannot_be_read_now_stay(rebalanced: Any) -> None:
    rebalanced.weights.moved = None
    for _ in range(2 * EVERY + 1):
        assert rebalanced.step() == "batch"
    assert len(rebalanced.weights.asked) == 2 and rebalanced.balancer.num_moved == 0


def test_no_expert_moves_without_tokens(rebalanced: Any) -> None:
    for _ in range(2 * EVERY):
        rebalanced.counts.zero_()
        assert rebalanced.role.next_batch() == "batch"
        rebalanced.role.finish("batch", None)
    assert not rebalanced.weights.asked
