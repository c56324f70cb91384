"""Lockstep of a data-parallel group: all its nodes begin each step together.

Before each step, every node announces its part of it, and waits for the announcements of the
others. If a node has rows, all nodes launch the step. Otherwise all nodes go idle.

Any node that has something to announce wakes the group:

    the node:   announces -> signals the descriptors that the others sleep on -> waits for them
    another:    looks for announcements -> sleeps on its descriptor, if it has found none

A signal follows the announcement and persists until it has ended a sleep, so that none is lost.
"""

import os
import select
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from common.errors import RankLost
from engine.ranks.shm import SharedMemoryGroup


class ShutdownStage(IntEnum):
    """The stages of a node's shutdown."""

    SERVING = 0
    DRAINING = 1
    DRAINED = 2  # no requests are left


class Announcement(NamedTuple):
    """A node's announcement about the next step.

    Attributes:
        num_tokens: tokens of its forward.
        launches: whether it has something to launch, possibly only copies of pages.
        decodes: whether it has decode rows.
        wants_prefill: whether prompts wait for their forward.
        has_room: whether a prompt could be admitted.
        chunks: whether a prompt is partly computed.
        allowed_ms: longest time that its part may take on a healthy node.
    """

    num_tokens: int = 0
    launches: bool = False
    decodes: bool = False
    wants_prefill: bool = False
    has_room: bool = False
    chunks: bool = False
    allowed_ms: int = 0
    stage: ShutdownStage = ShutdownStage.SERVING


class Lockstep:
    """The part of one node in the steps of its group. Engine thread only.

    Args:
        group: collectives of all nodes, used only here.
        others: pidfds of the other nodes' engines, by rank. Owned by this object.
        wakes: eventfds on which the other nodes sleep. Owned by this object.

    Attributes:
        announcements: announcements of all nodes for the newest step, by rank.
        waited_s: total time spent waiting for the other nodes.
        idle_batches: number of steps in which this node had nothing to launch.
        delayed_prefills: number of steps in which its prompts waited for prompts of other nodes.
    """

    def __init__(
        self, group: SharedMemoryGroup, others: Sequence[int], wakes: Sequence[int]
    ) -> None:
        self._group = group
        self._everyone = range(group.size)
        self._others = others
        self._wakes = wakes
        self._asleep = True
        self._ended = select.epoll()
        for pidfd in others:
            self._ended.register(pidfd, select.EPOLLIN)
        self.announcements: Sequence[Announcement] = (Announcement(),) * group.size
        self.waited_s = 0.0
        self.idle_batches = self.delayed_prefills = 0

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def ended(self) -> int:
        """Descriptor that is readable when another node has ended before the group is drained."""
        return self._ended.fileno()

    @property
    def is_drained(self) -> bool:
        """Return whether all nodes are drained. The group then makes no more steps."""
        return all(each.stage is ShutdownStage.DRAINED for each in self.announcements)

    def meet(self, own: Announcement) -> bool:
        """Announce this node's part of a step, and wait for the others.

        Returns:
            Whether to launch the step. False if the group is idle and there is nothing to announce.
        Raises:
            RankLost: another node has ended or timed out.
        """
        if self._asleep and not self._begins(own):
            return False
        began = time.monotonic()
        row = torch.tensor([own], dtype=torch.int64).view(-1)
        self._group.publish(row, self._everyone)
        if self._asleep:
            for wake in self._wakes:
                os.eventfd_write(wake, 1)
        parts = self._group.collect(row, self._everyone)
        self.announcements = [_announcement_of(part.tolist()) for part in parts]
        self.waited_s += time.monotonic() - began
        self._asleep = not any(each.launches for each in self.announcements)
        if self.is_drained:  # the others may end from now on
            for pidfd in self._others:
                self._ended.unregister(pidfd)
        return not self._asleep

    def close(self) -> None:
        self._ended.close()
        for descriptor in (*self._others, *self._wakes):
            os.close(descriptor)
        self._group.close()

    def _begins(self, own: Announcement) -> bool:
        """Return whether an idle group must begin a step."""
        if self.is_drained:
            return False
        before = self.announcements[self.rank]
        if own.launches or own.stage is not before.stage or self._group.is_awaited:
            return True
        if self._ended.poll(0):
            raise RankLost("another node of the group has ended")
        return False


def _announcement_of(numbers: Sequence[int]) -> Announcement:
    num_tokens, *flags, allowed_ms, stage = numbers
    return Announcement._make((num_tokens, *map(bool, flags), allowed_ms, ShutdownStage(stage)))
