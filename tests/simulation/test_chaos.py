"""Chaos by seed: what seeds draw, how a failure is reduced, and that planted faults are found."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli import sim
from simulation.virtual.chaos import as_yaml, drawn, reduced
from simulation.virtual.faults import KINDS
from simulation.virtual.process import environment
from simulation.virtual.scenario import Scenario, read
from tests.simulation.planted import BUGS, MISSED, PAGES

SEEDS = 10  # that find each bug which is not in MISSED


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
    for seed in range(40):
        scenario = drawn(seed)
        assert scenario == drawn(seed)
        file.write_text(as_yaml(scenario))
        assert read(file) == scenario
        kinds |= {kind for fault in scenario.faults for kind in KINDS if hasattr(fault, kind)}
    assert kinds == KINDS.keys()


def test_a_failure_is_reduced_to_the_faults_and_requests_that_it_needs() -> None:
    scenario = next(each for seed in range(99) if len((each := drawn(seed)).faults) == 4)
    needed = scenario.faults[2]

    def broken(smaller: Scenario) -> list[str]:
        only = smaller.load.only or range(smaller.load.requests)
        return ["it fails"] if needed in smaller.faults and {3, 5} <= {*only} else []

    small, violations = reduced(scenario, ["at first"], broken)
    assert (small.faults, small.load.only, violations) == ((needed,), (3, 5), ["it fails"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "FILE or --chaos"),
        (("x.yaml", "--chaos", "1"), "FILE or --chaos"),
        (("x.yaml", "--seeds", "2"), "--seeds needs --chaos"),
        (("--chaos", "-1"), "'-1'"),
        (("--chaos", "1", "--seeds", "0"), "at least 1"),
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
@pytest.mark.parametrize("name", sorted(BUGS.keys() - MISSED))
def test_seeds_find_planted_bugs(name: str) -> None:
    found = planted("bug", name, "0", str(SEEDS))
    assert found["seed"] is not None and found["violations"]
