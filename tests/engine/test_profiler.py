"""A profile of steps on the forward stream, and the trace that is written of it."""

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
    """A stream with something to see, and how often it has been done."""

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


def test_a_trace_shows_what_steps_have_computed_and_ends_with_them(made, steps, tmp_path):
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


def test_a_profile_is_stopped_before_it_has_its_steps(made, steps):
    path = made.start(1000)
    steps.step()
    made.poll()
    assert made.stop().result(WAIT_S) == path
    assert "aten::mm" in names(path)


def test_a_profile_ends_with_its_time_where_nothing_is_computed(made, steps, monkeypatch):
    monkeypatch.setattr(profiler, "LONGEST_S", 0.0)
    told = []
    made.notify = lambda: told.append(True)
    path = made.start(1000)
    made.poll()
    assert made.stop().result(WAIT_S) == path and Path(path).exists()
    assert told


def test_without_a_directory_nothing_is_profiled(steps, tmp_path):
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
