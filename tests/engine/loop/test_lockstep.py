"""Nodes of a group start each step together, sleep together, and end together."""

import contextlib
import itertools
import os
import queue
import random
import select
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import ParallelConfig
from common.errors import ConfigError
from engine.loop.grouped import DelayedPrompts
from engine.ranks import node_group
from engine.ranks.lockstep import Announcement, Lockstep
from engine.ranks.node_group import join_group
from engine.scheduler import next_rows
from engine.scheduler.next_rows import MAX_PASSES, PrefillCounts, prefills_now
from tests.support.engine.group_nodes import PATIENCE_S, join_all
from tests.support.processes import fork_server

NUM_WAKES = 400


class Sleeper(threading.Thread):
    """A node that sleeps until it has work, or until another node wakes it, without polling."""

    def __init__(self, lockstep: Lockstep, wake: int) -> None:
        super().__init__(daemon=True)
        self.steps: list[list[int]] = []
        self._work: deque[int] = deque()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_open = 0  # for the thread that submits work
        self._lockstep = lockstep
        self._wake = wake
        self._ended = False

    def give(self) -> None:
        self._num_open += 1
        self._work.append(1)
        os.eventfd_write(self._wake, 1)

    def settle(self) -> None:
        while self._num_open:
            self._done.get(timeout=PATIENCE_S)
            self._num_open -= 1

    def end(self) -> None:
        self._ended = True
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        while not self._ended:
            mine = self._work.popleft() if self._work else 0
            if self._lockstep.meet(Announcement(mine, launches=bool(mine))):
                self.steps.append([each.num_tokens for each in self._lockstep.announcements])
                if mine:
                    self._done.put(mine)
                continue
            select.select([self._wake], [], [])
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)


@pytest.mark.parametrize("size", [2, 3])
def test_no_wake_up_of_a_sleeping_group_is_lost(size: int, tmp_path: Path) -> None:
    """Random nodes get work, some of it while the group falls asleep."""
    draw = random.Random(size)
    wakes = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(size)]
    groups = join_all(size, tmp_path / "group", wakes, PATIENCE_S)
    nodes = [Sleeper(group.lockstep, wake) for group, wake in zip(groups, wakes, strict=True)]
    for node in nodes:
        node.start()
    for _ in range(NUM_WAKES):
        chosen = draw.sample(nodes, draw.randint(1, size))
        for node in chosen:
            node.give()
        for node in chosen[: draw.randint(0, size)]:  # the others may have work left
            node.settle()
    for node in nodes:
        node.settle()
    for node in nodes:
        node.end()
        node.join(PATIENCE_S)
    assert all(node.steps == nodes[0].steps for node in nodes)
    for group in groups:
        group.close()


class Process:
    """A node of a test group."""

    def __init__(self, directory: Path, rank: int, size: int, timeout_s: float) -> None:
        standard_input, self._input = os.pipe()
        output, standard_output = os.pipe()
        arguments = [str(directory), str(rank), str(size), str(timeout_s)]
        files = standard_input, standard_output, 2
        module = "tests.support.engine.group_program"
        self.process = fork_server.start(module, arguments, {**os.environ}, Path.cwd(), files)
        for file in files[:2]:
            os.close(file)
        self._output = os.fdopen(output)

    def says(self) -> str:
        ready, _, _ = select.select([self._output], [], [], PATIENCE_S)
        assert ready, "the node says nothing"
        return self._output.readline().strip()

    def give(self, line: str) -> None:
        os.write(self._input, f"{line}\n".encode())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._input)
        self._output.close()


@contextlib.contextmanager
def processes(directory: Path, size: int, timeout_s: float = PATIENCE_S) -> Iterator[list[Process]]:
    nodes = [Process(directory / "group", rank, size, timeout_s) for rank in range(size)]
    try:
        for node in nodes:
            assert node.says() == "joined"
        yield nodes
    finally:
        for node in nodes:
            node.end()


def test_a_killed_node_ends_a_sleeping_group(tmp_path: Path) -> None:
    with processes(tmp_path, 3) as nodes:
        nodes[1].process.kill()
        for node in (nodes[0], nodes[2]):
            assert node.says() == "another node of the group has ended"


def test_a_frozen_node_ends_the_group_at_the_next_step(tmp_path: Path) -> None:
    with processes(tmp_path, 2, timeout_s=5.0) as nodes:
        os.kill(nodes[1].process.pid, signal.SIGSTOP)
        nodes[0].give("work")
        assert nodes[0].says() == "rank 1 is 5 s late in a collective"
        assert nodes[0].process.wait(PATIENCE_S) == 0
        os.kill(nodes[1].process.pid, signal.SIGCONT)
        said = nodes[1].says()
        if said == "step [1, 0]":  # it slept, and notices the step for which it was woken
            said = nodes[1].says()
        assert "has ended" in said


def test_a_group_ends_as_a_whole_when_all_nodes_are_drained(tmp_path: Path) -> None:
    with processes(tmp_path, 3) as nodes:
        nodes[2].give("drain")
        nodes[0].give("work")
        assert [node.says() for node in nodes] == ["step [1, 0, 0]"] * 3
        nodes[1].give("drain")
        nodes[0].give("drain")
        assert [node.says() for node in nodes] == ["drained"] * 3
        nodes[0].process.kill()
        nodes[0].process.wait()
        nodes[1].give("look")
        assert nodes[1].says() == "others have ended: False"


def parallel(directory: Path, rank: int) -> ParallelConfig:
    return ParallelConfig(dp=2, dp_rank=rank, dp_group=directory)


def test_a_node_with_other_settings_or_an_invalid_rank_may_not_join(tmp_path: Path) -> None:
    wake, directory = os.eventfd(0, os.EFD_NONBLOCK), tmp_path / "group"
    with ThreadPoolExecutor() as threads:
        leading = threads.submit(join_group, parallel(directory, 0), "equal", wake)
        with pytest.raises(ConfigError, match=r"cannot join the group: its settings differ"):
            join_group(parallel(directory, 1), "other", wake)
        larger = ParallelConfig(dp=3, dp_rank=2, dp_group=directory)
        with pytest.raises(ConfigError, match=r"rank 2 is invalid: the group has 2 nodes"):
            join_group(larger, "equal", wake)
        assert not leading.done()
        join_group(parallel(directory, 1), "equal", wake).close()
        leading.result(PATIENCE_S).close()
    os.close(wake)


def test_a_missing_node_is_reported_by_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_group, "MEET_S", 0.2)
    for rank, reason in ((0, r"nodes \[1\] of the group"), (1, "rank 0 of the group")):
        with pytest.raises(Exception, match=reason):
            join_group(parallel(tmp_path / "group", rank), "equal", 0)


def test_a_directory_that_other_users_may_enter_is_rejected(tmp_path: Path) -> None:
    directory = tmp_path / "group"
    directory.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"must belong to this user alone \(mode 0700\)"):
        join_group(parallel(directory, 0), "equal", 0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_prompts_are_delayed_only_if_that_may_gain_something(size: int) -> None:
    """For everything that the nodes of a group can announce in a step."""
    per_node = [
        (has_room, wants and has_room, decodes, chunks)
        for has_room, wants, decodes, chunks in itertools.product((False, True), repeat=4)
    ]
    for nodes in itertools.combinations_with_replacement(per_node, size):
        counts = PrefillCounts(*(sum(column) for column in zip(*nodes, strict=True)))
        delayed = not prefills_now(counts, MAX_PASSES - 1)
        assert delayed <= bool(counts.decoding and not counts.chunking)
        assert delayed <= (counts.ready < counts.with_room or not counts.with_room)
        assert prefills_now(counts, MAX_PASSES)


# A node in the search: whether it decodes, and the number of steps since its prompt has arrived.
State = tuple[bool, int, tuple[tuple[bool, int], ...]]
MAX_SEARCHED = 4  # steps by which prompts are delayed, instead of MAX_PASSES


@pytest.mark.parametrize("size", [2, 3])
def test_no_prompt_waits_longer_than_the_limit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches all reachable states of a group, in which prompts arrive and decode rows end at
    any time."""
    monkeypatch.setattr(next_rows, "MAX_PASSES", MAX_SEARCHED)
    choices = list(itertools.product((False, True), repeat=2 * size))
    first: State = (True, 0, ((False, 0),) * size)
    seen, states, num_delayed = {first}, [first], 0
    while states:
        state = states.pop()
        for choice in choices:
            following, delayed = stepped(state, choice[:size], choice[size:])
            num_delayed += delayed
            if following not in seen:
                seen.add(following)
                states.append(following)
    assert num_delayed


def stepped(state: State, arrives: Sequence[bool], ends: Sequence[bool]) -> tuple[State, int]:
    """Return the state after a step, and how many nodes delayed a prompt in it."""
    is_open, waited, nodes = state
    turns, following = [], []
    for (decodes, age), arriving, ending in zip(nodes, arrives, ends, strict=True):
        decodes, age = decodes and not ending, age + bool(age or arriving)
        assert age <= MAX_SEARCHED + 2  # it arrives, waits, and is computed
        prefills = bool(age) and is_open
        launches = prefills or decodes
        turns.append(
            Announcement(int(launches), launches, decodes, bool(age) and not prefills, True)
        )
        following.append((decodes or prefills, 0 if prefills else age))
    counted: Any = SimpleNamespace(delayed_prefills=0)
    for (_, age), turn in zip(following, turns, strict=True):
        rows = SimpleNamespace(admits_prompts=is_open)
        scheduler: Any = SimpleNamespace(rows=rows, num_waiting=age)
        prompts = DelayedPrompts(scheduler, counted)
        prompts.waited = waited
        prompts.follow(turns)
        asleep = not any(each.launches for each in turns)
        assert not (asleep and turn.wants_prefill) or prompts.may_continue
    return (rows.admits_prompts, prompts.waited, tuple(following)), counted.delayed_prefills
