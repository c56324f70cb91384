"""The collectives of one rank: with the ranks of its stage, and with a rank of the other stage."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from common.config import ParallelConfig
from engine.ranks.expert_placement import ExpertPlacement
from engine.ranks.group import Group
from engine.ranks.meeting import Meeting
from engine.ranks.share import Share, Stage
from engine.ranks.shm import SharedMemoryGroup, memory_bytes, new_memory
from engine.ranks.torch_group import TorchGroup


@dataclass(frozen=True, slots=True, eq=False)
class RankGroups:
    """The collectives of one rank.

    Attributes:
        own: the ranks of its pipeline stage.
        pipe: see Stage. None: there is one stage.
    """

    share: Share
    own: Group
    pipe: Group | None = None

    def meet(self, device: torch.device) -> None:
        """Wait until all ranks of the node have called this (a barrier)."""
        for group in (self.own, self.pipe):
            if group is not None:
                group.all_reduce(torch.zeros(1, device=device))


def open_groups(
    config: ParallelConfig, rank: int, files: Sequence[int], meeting: Meeting
) -> RankGroups:
    """Open the collectives of one rank.

    Args:
        config: `collectives` is not auto.
        rank: number among all ranks of the node.
        files: descriptors of shared memory: of its stage and, with two stages, of its pipe. Then
            the pidfds of all other ranks, by rank. All are closed. Empty with several hosts.
        meeting: rendezvous for gloo and NCCL.
    """
    num_memories = config.pp
    memories, pidfds = files[:num_memories], list(files[num_memories:])
    pidfds.insert(rank, -1)
    stage, place = divmod(rank, config.tp)

    def opened(name: str, ranks: range, memory: Sequence[int]) -> Group:
        own = ranks.index(rank)
        if config.collectives in ("gloo", "nccl"):
            kind = config.collectives
            return TorchGroup(kind, own, len(ranks), meeting, name, config.collective_s)
        others = {other: os.dup(pidfds[other]) for other in ranks if other != rank}
        return SharedMemoryGroup(own, ranks, memory[0], others, config.collective_s)

    try:
        own = opened(f"stage-{stage}", _stage_ranks(config, stage), memories[:1])
        group, whole_experts = own if config.tp > 1 else None, config.experts == "ep"
        if config.pp == 1:
            placement = ExpertPlacement.of(config)
            share = Share(place, config.tp, group, whole_experts, placement=placement)
            return RankGroups(share, own)
        pipe = opened(f"pipe-{place}", _pipe_ranks(config, place), memories[1:])
        share = Share(place, config.tp, group, whole_experts, Stage(stage, pipe))
        return RankGroups(share, own, pipe)
    finally:
        for file in files:
            os.close(file)


def _stage_ranks(config: ParallelConfig, stage: int) -> range:
    return range(stage * config.tp, (stage + 1) * config.tp)


def _pipe_ranks(config: ParallelConfig, place: int) -> range:
    """Return the ranks of all stages with the same heads."""
    return range(place, config.num_ranks, config.tp)


@contextlib.contextmanager
def group_memories(config: ParallelConfig) -> Iterator[Callable[[int], Sequence[int]]]:
    """Create the shared memory of all groups. Yield a function that returns the descriptors of a
    rank's stage and pipe, as arguments of `open_groups`."""

    def created(num_groups: int, size: int) -> list[int]:
        num_bytes = memory_bytes(size)
        return [new_memory("baton-collectives", num_bytes) for _ in range(num_groups)]

    stages = created(config.pp, config.tp)
    pipes = created(config.tp if config.pp > 1 else 0, config.pp)
    try:
        yield lambda rank: [stages[rank // config.tp], *pipes[rank % config.tp :][:1]]
    finally:
        for memory in (*stages, *pipes):
            os.close(memory)
