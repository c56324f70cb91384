"""The nodes of a data-parallel group as threads of one process."""

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.config import EngineConfig, ParallelConfig
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.batch.request import Request
from engine.build import build
from engine.loop.grouped import GroupedRole, GroupedRunner
from engine.loop.loop import EventLoop
from engine.loop.step_clock import StepClock
from engine.ranks.lockstep import ShutdownStage
from engine.ranks.node_group import NodeGroup, join_group
from tests.support.engine.scheduler_role import SchedulerRole

PATIENCE_S = 60.0


def join_all(size: int, directory: Path, wakes: Sequence[int], timeout_s: float) -> list[NodeGroup]:
    """Return the group as each node sees it. The last node comes first."""

    def join(rank: int) -> NodeGroup:
        parallel = ParallelConfig(dp=size, dp_rank=rank, dp_group=directory, collective_s=timeout_s)
        return join_group(parallel, "equal", wakes[rank])

    with ThreadPoolExecutor(size) as threads:
        joining = [threads.submit(join, rank) for rank in reversed(range(size))]
        return [each.result(PATIENCE_S) for each in reversed(joining)]


class GroupNode(SchedulerRole):
    """A node of a group that only schedules. It sleeps until it is woken."""

    def __init__(self, config: EngineConfig, group: NodeGroup, wake: int) -> None:
        super().__init__()
        self.group = group
        self.draining = False
        self.drain_noticed = 0
        self.is_asleep = threading.Event()
        self.has_token = threading.Event()
        self._wake = wake
        self._arrived: deque[Request] = deque()
        self._num_open = 0
        self._done = threading.Condition()
        self.use(build(config, group=group), config)
        self.clock = StepClock()
        runner: Any = self.engine.runner
        model: Any = self.engine.model
        lockstep, exchange = group.lockstep, group.exchange
        role = GroupedRole(
            self,
            lockstep,
            self.scheduler,
            self.clock,
            stage=self._stage,
            on_drain=self._notice_drain,
            delays=config.scheduler.prefill_delayer,
        )
        grouped = GroupedRunner(runner, runner.forwards, model, exchange, lockstep)
        self.loop = EventLoop(role, grouped, clock=self.clock)

    def submit(self, *requests: Request) -> None:
        """Submit requests. For any thread."""
        with self._done:
            self._num_open += len(requests)
        self._arrived.extend(requests)
        self.wake()

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def wait(self) -> None:
        """Wait until all requests have ended."""
        with self._done:
            assert self._done.wait_for(lambda: not self._num_open, PATIENCE_S), "no answer"

    def poll(self) -> None:
        while self._arrived:
            self.schedule(self._arrived.popleft())

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> Any:
        outcome = super().finish(batch, result)
        if len(outcome.tokens):
            self.has_token.set()
        with self._done:
            self._num_open -= len(outcome.finished)
            self._done.notify_all()
        return outcome

    def idle(self) -> None:
        self.is_asleep.set()
        select.select([self._wake, self.group.lockstep.ended], [], [], PATIENCE_S)
        self.is_asleep.clear()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _stage(self) -> ShutdownStage:
        if not self.draining:
            return ShutdownStage.SERVING
        return ShutdownStage.DRAINING if self.scheduler.has_work else ShutdownStage.DRAINED

    def _notice_drain(self) -> None:
        self.drain_noticed += 1


@contextlib.contextmanager
def running(
    size: int, directory: Path, config_of: Callable[[], EngineConfig], timeout_s: float = PATIENCE_S
) -> Iterator[list[GroupNode]]:
    """Run the nodes of a group. A failure of any node is raised at the end."""
    wakes = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(size)]
    groups = join_all(size, directory, wakes, timeout_s)
    nodes = [GroupNode(config_of(), group, wake) for group, wake in zip(groups, wakes, strict=True)]
    with ThreadPoolExecutor(size) as threads:
        loops = [threads.submit(node.loop.run) for node in nodes]
        try:
            yield nodes
            for node in nodes:
                assert node.is_asleep.wait(PATIENCE_S), "the group does not fall asleep"
        finally:
            for node in nodes:
                node.loop.stop()
                node.wake()
        for loop in loops:
            loop.result(PATIENCE_S)
    for node in nodes:
        node.engine.close()
