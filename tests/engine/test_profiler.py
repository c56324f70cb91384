"""A profile of steps on the forward stream, and its trace file."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from common.errors import FailedPrecondition, Overloaded
from engine import profiler
from engine.profiler import Profiler
from engine.runner.stream import WorkerStream

WAIT_S = 120.0


class Steps:
    """A stream with visible operations, which counts its steps."""

    def __init__(self):
        self.stream = WorkerStream()
        self.num = 0

    def step(self):
        self.stream.submit(lambda: torch.ones(8, 8) @ torch.ones(8, 8)).wait()
        self.num += 1


@pytest.fixture
def steps():
    steps = Steps()
    yield steps
    steps.stream.close()


@pytest.fixture
def made(steps, tmp_path):
    made = Profiler(tmp_path, "test", steps.stream, torch.device("cpu"), lambda: steps.num)
    yield made
    made.close()


def names(path: str) -> set[str]:
    """Return the names of the events in a trace."""
    with gzip.open(path, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def test_a_trace_contains_the_operations_of_its_steps_and_ends_with_them(made, steps, tmp_path):
    path = made.start(2)
    assert Path(path).parent == tmp_path and Path(path).name.startswith("test-")
    with pytest.raises(Overloaded):
        made.start(2)
    for _ in range(3):
        steps.step()
        made.poll()
    written = made.stop()
    assert written.result(WAIT_S) == path
    assert "aten::mm" in names(path)
    assert made.stop().result(WAIT_S) == path


def test_a_profile_can_be_stopped_before_its_last_step(made, steps):
    path = made.start(1000)
    steps.step()
    made.poll()
    assert made.stop().result(WAIT_S) == path
    assert "aten::mm" in names(path)


def test_a_profile_ends_at_its_time_limit_without_steps(made, steps, monkeypatch):
    monkeypatch.setattr(profiler, "LONGEST_S", 0.0)
    told = []
    made.notify = lambda: told.append(True)
    path = made.start(1000)
    made.poll()
    assert made.stop().result(WAIT_S) == path and Path(path).exists()
    assert told


def test_without_a_directory_profiles_are_rejected(steps, tmp_path):
    cpu = torch.device("cpu")
    for directory, said in (
        (None, r"has no engine\.profile_dir"),
        (tmp_path / "missing", "is no directory"),
    ):
        made = Profiler(directory, "test", steps.stream, cpu, lambda: 0)
        with pytest.raises(FailedPrecondition, match=said):
            made.start(1)
        with pytest.raises(FailedPrecondition, match="no profile is running"):
            made.stop()
        made.close()
