"""Chaos by seed: what seeds draw, how a failure is reduced, and that planted faults are found."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cli import sim
from simulation.virtual.chaos import as_yaml, drawn, reduced
from simulation.virtual.faults import KINDS
from simulation.virtual.operations import COMMANDS
from simulation.virtual.process import environment
from simulation.virtual.run import scratch_directory
from simulation.virtual.scenario import Scenario, read
from tests.simulation.planted import BUGS, PAGES

SEEDS = 30  # that find each bug


def run(module: str, *arguments: str, timeout_s: float = 500) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )


def planted(*arguments: str) -> Any:
    done = run("tests.simulation.planted", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_seed_draws_a_valid_file(tmp_path: Path) -> None:
    file, kinds = tmp_path / "sim.yaml", set()
    for seed in range(60):
        scenario = drawn(seed)
        assert scenario == drawn(seed)
        file.write_text(as_yaml(scenario))
        assert read(file) == scenario
        drawn_here = (*scenario.faults, *scenario.operations)
        kinds |= {kind for each in drawn_here for kind in KINDS | COMMANDS if hasattr(each, kind)}
        if scenario.planner is not None:
            kinds.add("planner")
    assert kinds == {*KINDS, *COMMANDS, "planner"}


def test_a_failure_is_reduced_to_what_it_needs() -> None:
    scenario = next(each for seed in range(999) if _has_much(each := drawn(seed)))
    fault, operation = scenario.faults[1], scenario.operations[2]

    def broken(smaller: Scenario) -> list[str]:
        only = smaller.load.only or range(smaller.load.requests)
        needed = fault in smaller.faults and operation in smaller.operations
        return ["it fails"] if needed and {3, 5} <= {*only} else []

    small, violations = reduced(scenario, ["at first"], broken)
    assert (small.faults, small.operations, small.planner) == ((fault,), (operation,), None)
    assert (small.load.only, violations) == ((3, 5), ["it fails"])


def _has_much(scenario: Scenario) -> bool:
    return (
        len(scenario.faults) > 1
        and len(scenario.operations) > 2
        and scenario.planner is not None
        and len({*scenario.operations}) == len(scenario.operations)
    )


def test_a_run_deletes_the_directories_of_killed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import signal, os, tempfile\n"
        "from simulation.virtual.run import scratch_directory\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "with scratch_directory() as directory:\n"
        "    (directory / 'pool').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60)
    assert len([*tmp_path.iterdir()]) == 1
    os.mkfifo(pipe := tmp_path / "baton-virtual-pipe")  # of another user
    with scratch_directory() as first, scratch_directory() as second:
        assert {*tmp_path.iterdir()} == {first, second, pipe}
    assert [*tmp_path.iterdir()] == [pipe]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "FILE or --chaos"),
        (("x.yaml", "--chaos", "1"), "FILE or --chaos"),
        (("x.yaml", "--seeds", "2"), "--seeds needs --chaos"),
        (("--chaos", "-1"), "'-1'"),
        (("--chaos", "1", "--seeds", "0"), "must be from 1"),
    ],
)
def test_unusable_arguments_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: Any, named: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton sim", *arguments])
    with pytest.raises(SystemExit) as ended:
        sim.main()
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.long
def test_seeds_repeat_exactly_and_break_no_rule() -> None:
    first, second = (run("cli.main", "sim", "--chaos", "0", "--seeds", "8", "--json") for _ in "12")
    assert first.returncode == 0, first.stdout
    reports = [json.loads(each.stdout) for each in (first, second)]
    assert reports[0]["hash"] == reports[1]["hash"]
    assert (reports[0]["seeds"], reports[0]["failures"]) == (8, [])


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fault_gives_wrong_tokens_within_a_minute(name: str) -> None:
    found = planted("page", name)
    assert found["seconds"] < 60
    if name == "none":
        assert (found["wrong"], found["errors"], found["violations"]) == (0, {}, [])
    else:
        assert any("wrong from token" in each for each in found["violations"])


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_seeds_find_planted_bugs(name: str) -> None:
    found = planted("bug", name, "0", str(SEEDS))
    assert found["seed"] is not None and found["violations"]
