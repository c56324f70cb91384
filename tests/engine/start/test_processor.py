"""The number of cores that a process assumes: by its affinity, its container, OMP_NUM_THREADS."""

import math
import os

import pytest

from engine import processor
from engine.processor import cgroup_cpus, physical_cores, threads_at_hand, usable_cores


def _topology(directory, other_processes):
    """Args:
    other_processes: the list of each CPU from the kernel.
    """
    for cpu, listed in other_processes.items():
        (directory / f"cpu{cpu}/topology").mkdir(parents=True)
        (directory / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{listed}\n")


def test_two_hyperthreads_are_one_core(tmp_path):
    # Seen failing if CPUs are counted.
    _topology(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert physical_cores([0, 1, 2, 3], tmp_path) == 2
    assert physical_cores([0, 2], tmp_path) == 1
    assert physical_cores([0, 1], tmp_path) == 2
    assert physical_cores([7, 8], tmp_path) == 2  # without information about them


@pytest.mark.parametrize("own", ["0::/a/b\n", "1:cpu:/z\n0::/a/b\n"])
def test_the_smallest_limit_of_the_enclosing_cgroups_counts(tmp_path, own):
    # Seen failing with only the innermost, and with only the mount.
    (tmp_path / "own").write_text(own)
    mount = tmp_path / "mount"
    (mount / "a/b").mkdir(parents=True)
    assert cgroup_cpus(mount, tmp_path / "own") == math.inf
    (mount / "a/b/cpu.max").write_text("max 100000\n")
    assert cgroup_cpus(mount, tmp_path / "own") == math.inf
    (mount / "a/cpu.max").write_text("250000 100000\n")
    assert cgroup_cpus(mount, tmp_path / "own") == 2.5
    (mount / "a/b/cpu.max").write_text("400000 100000\n")
    (mount / "cpu.max").write_text("50000 100000\n")
    assert cgroup_cpus(mount, tmp_path / "own") == 0.5


def test_a_container_that_sees_only_its_own_cgroup_follows_it(tmp_path):
    (tmp_path / "own").write_text("0::/docker/abc\n")  # without a mount
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cgroup_cpus(tmp_path, tmp_path / "own") == 1.5
    (tmp_path / "cpu.max").write_text("nonsense")
    assert cgroup_cpus(tmp_path, tmp_path / "no such file") == math.inf


def test_a_limit_counts_in_whole_cores_and_at_least_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(100, 164))
    for limit, expected in ((math.inf, 64), (8.0, 8), (2.5, 2), (0.5, 1)):
        monkeypatch.setattr(processor, "cgroup_cpus", lambda limit=limit: limit)
        assert usable_cores() == expected


def test_openmps_own_variable_takes_precedence():
    # Seen failing without it.
    assert threads_at_hand({"OMP_NUM_THREADS": "77"}) == 77
    assert threads_at_hand({"OMP_NUM_THREADS": " 5,2"}) == 5
    for nothing in ({}, {"OMP_NUM_THREADS": ""}, {"OMP_NUM_THREADS": "0"}):
        assert threads_at_hand(nothing) == usable_cores()
