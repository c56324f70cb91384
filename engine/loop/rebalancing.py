"""Rebalancing of experts between the ranks of a node, every given number of steps (EPLB).

The device counts the tokens of each expert on rank 0. While no step is launched, rank 0 reads the
counts and computes a new placement. Every rank then reads the weights of the experts that are new
to it.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

import torch

from common.logs import kv
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.loop.loop import EngineRole
from engine.models.blocks.placed_experts import PlacedExperts
from engine.ranks.expert_placement import (
    ExpertPlacement,
    LayerSlots,
    balanced,
    imbalance,
    num_moved,
)
from engine.runner.stream import DeviceStream

_TURN_S = 0.02  # duration of a turn of the loop while experts move

log = logging.getLogger(__name__)


class ExpertWeights(Protocol):
    """The weights of all ranks, see WeightUpdater."""

    def move_experts(self, moves: Mapping[str, LayerSlots]) -> Future[None] | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """A move of experts in progress.

    Attributes:
        imbalance: imbalance after the move, computed from the same counts as the move.
    """

    future: Future[None]
    began: float
    num_layers: int
    num_slots: int
    imbalance: float


class ExpertBalancer:
    """Counts tokens per expert and moves experts accordingly. Engine thread only.

    Args:
        layers: layers of rank 0, which count tokens.
        every_steps: number of steps between two moves.
    Attributes:
        imbalance: see `imbalance`, computed from the newest counts.
        num_moved: total number of slots that got another expert.
        seconds: total time of moves.
    """

    def __init__(
        self,
        layers: Sequence[PlacedExperts],
        placement: ExpertPlacement,
        weights: ExpertWeights,
        stream: DeviceStream,
        every_steps: int,
    ) -> None:
        self.every_steps = every_steps
        self.imbalance = 1.0
        self.num_moved = 0
        self.seconds = 0.0
        self._layers = layers
        self._placement = placement
        self._weights = weights
        self._stream = stream
        self._move: _Move | None = None
        self._read_counts()  # discards the counts of the warmup

    def begin(self) -> None:
        """Start a move if it makes the load clearly more equal. No step may be launched until it
        ends."""
        began = time.monotonic()
        counts = self._read_counts()
        before = [self._placement.slots(each.layer, each.shape.count) for each in self._layers]
        self.imbalance = imbalance(counts, before)
        after = [balanced(*layer) for layer in zip(counts, before, strict=True)]
        layers = zip(self._layers, before, after, strict=True)
        moves = {each.layer: new for each, old, new in layers if new != old}
        if not moves:
            return
        future = self._weights.move_experts(moves)
        if future is None:
            log.warning("experts are not moved, because their weights cannot be read now")
            return
        num_slots = sum(map(num_moved, before, after))
        self._move = _Move(future, began, len(moves), num_slots, imbalance(counts, after))

    def wait_for_move(self, longest_s: float) -> None:
        """Wait until no experts move, at most this long."""
        if self._move is not None:
            wait([self._move.future], longest_s)

    def is_moving(self) -> bool:
        """Return whether experts move. Raises the error of a rank, which is fatal for the node."""
        if (move := self._move) is None:
            return False
        if not move.future.done():
            return True
        self._move = None
        move.future.result()
        seconds = time.monotonic() - move.began
        self.seconds += seconds
        self.num_moved += move.num_slots
        log.info(
            "experts moved %s",
            kv(
                slots=move.num_slots,
                layers=move.num_layers,
                seconds=f"{seconds:.3f}",
                imbalance_before=f"{self.imbalance:.3f}",
                imbalance_after=f"{move.imbalance:.3f}",
            ),
        )
        return False

    def _read_counts(self) -> Sequence[Sequence[int]]:
        """Return the tokens per layer and expert since the last call."""
        counts: list[list[int]] = []

        def read() -> None:
            with torch.inference_mode():
                for each in self._layers:
                    assert each.counts is not None
                    counts.append(each.counts.tolist())
                    each.counts.zero_()

        self._stream.submit(read).wait()
        return counts


class RebalancingRole:
    """A role that launches nothing while experts move. Engine thread only."""

    def __init__(self, role: EngineRole, balancer: ExpertBalancer) -> None:
        self._role = role
        self._balancer = balancer
        self._num_steps = 0  # since the last move
        self._num_launched = 0  # launched steps that are not finished
        self._held = False  # whether the last turn could not launch a step because experts moved

    def poll(self) -> None:
        self._role.poll()

    def next_batch(self) -> ScheduleBatch | None:
        if self._num_steps >= self._balancer.every_steps:
            if self._num_launched:
                return None
            self._num_steps = 0
            self._balancer.begin()
        self._held = self._balancer.is_moving()
        if self._held:
            return None
        batch = self._role.next_batch()
        if batch is not None:
            self._num_launched += 1
            self._num_steps += 1
        return batch

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        self._num_launched -= 1
        self._role.finish(batch, result)

    def idle(self) -> None:
        # The role may end while it is idle. Its successor must not launch steps while experts move.
        if self._held:
            self._balancer.wait_for_move(_TURN_S)
        else:
            self._role.idle()
