"""The GPU bench's dry mode from end to end, and the guarantees of its frame."""

import json
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels.backends.package import Package
from tests.support.hardware import optional_packages
from tests.support.processes.programs import runs
from tools.bench.gpu import goals
from tools.bench.gpu.operation import Op, difference, measure_ops, measure_package
from tools.bench.gpu.parts import PARTS, attention, kernels
from tools.bench.gpu.setting import Floor, Setting

CEILINGS = dict.fromkeys(("copy", "read", "matmul"), 1.0)
NOT_ON_A_CPU = {"nodes of a CUDA graph", "flashinfer", "fla"}


def long(test):
    """Mark a test of the dry run of all parts."""
    for mark in (pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Return the last line of stdout of a run of all parts, and the directory of the results."""
    out = tmp_path_factory.mktemp("gpu-bench")
    command = [
        sys.executable,
        "-m",
        "tools.bench.gpu",
        "--dry",
        "--out",
        str(out),
        "--budget-s",
        "2000",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(done.stdout.splitlines()[-1]), out


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


@long
def test_the_dry_mode_runs_every_part_to_its_end(dry_run):
    summary, out = dry_run
    parts = {part.name for part in PARTS}
    statuses = {name: part["status"] for name, part in summary["parts"].items()}
    assert statuses == dict.fromkeys(parts, "done")
    rows = rows_of(out)
    assert {row["part"] for row in rows} == parts
    notes = {row["what"]: row["note"] for row in rows if row["table"] == "notes"}
    assert notes.keys() == NOT_ON_A_CPU, notes
    assert json.loads((out / "record.json").read_text())["rows"] == rows


@long
def test_every_share_has_a_denominator_and_every_operation_was_verified(dry_run):
    rows = rows_of(dry_run[1])
    shares = [
        row["share"] for row in rows if "share" in row and row["table"] != "where a step goes"
    ]
    assert len(shares) > 30 and all(share > 0.0 for share in shares)
    errors = [row["error"] for row in rows if "error" in row]
    assert len(errors) > 30 and max(errors) < 1e-4


@long
def test_responses_are_the_same_for_every_system(dry_run):
    compared = {
        row["what"]: row["value"] for row in rows_of(dry_run[1]) if row["table"] == "compared"
    }
    equal = [value for what, value in compared.items() if "equal" in what]
    assert len(equal) == 3 and set(equal) == {1.0}


@long
def test_every_goal_has_its_row(dry_run):
    as_large = {"model": "Llama-3-8B", "context": 1024, "tokens": 8192}
    rows = []
    for row in rows_of(dry_run[1]):
        large = row | {name: value for name, value in as_large.items() if name in row}
        if row["table"] == "decode":
            large["shape"] = "64 x 8192, 32/8x128"
        if "batch" in row:
            large["batch"] = 1 if row["batch"] == 1 and row["table"] == "steps" else 64
        rows.append(large)
    assert all(goal["measured"] is not None for goal in goals.reached(rows))


def test_an_operation_with_a_wrong_result_is_not_timed():
    def op(name, found):
        return Op(
            name=name,
            shape="",
            call=lambda: timed.append(name) or torch.tensor([found]),
            floor=Floor("copy", 1.0),
            compare=lambda result: [(result, torch.tensor([1.0]))],
            tolerance=0.1,
        )

    def breaks():
        raise ValueError("no such shape")

    timed: list[str] = []
    setting = Setting.make(CEILINGS, dry=True)
    results = {"right": 1.05, "wrong": 1.2, "not a number": torch.nan}
    makes = [partial(op, name, found) for name, found in results.items()]
    broken = partial(Op, "broken", "", breaks, Floor("copy", 1.0), lambda result: [])
    rows = list(measure_ops(setting, [*makes, broken], "table"))
    assert [row["table"] for row in rows] == ["table", "notes", "notes", "notes"]
    assert sorted(timed) == ["not a number", "right", "right", "wrong"], "one call is the check"
    assert "no such shape" in rows[-1]["note"]


def test_integers_must_be_equal():
    found, exact = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])
    assert difference(found, exact) == 0.25 and difference(exact, exact) == 0.0


def test_operations_of_installed_packages_are_measured(monkeypatch):
    setting = Setting.make(CEILINGS, dry=True)
    tables = {"flashinfer": attention.flashinfer_ops, "fla": kernels.fla_ops}
    for name, ops in tables.items():
        (missing,) = measure_package(setting, ops, name)
        assert missing["table"] == "notes" and "is not installed: install" in missing["note"]
    flashinfer, fla = optional_packages.flashinfer(), optional_packages.fla()
    monkeypatch.setattr(
        Package, "load", lambda self: {"flashinfer": flashinfer}.get(self.module, fla)
    )
    for name, ops in tables.items():
        rows = list(measure_package(setting, ops, name))
        assert {row["table"] for row in rows} == {name} and max(row["error"] for row in rows) < 1e-4
    kinds = {type(wrapper).__name__ for wrapper in flashinfer.plans}
    assert kinds == {"Extend", "Decode", "Latent"} and fla.calls


# The frame forks, so it runs in a process without pytest's threads.
FRAME = textwrap.dedent(
    """
    import json, os, subprocess, sys, time, types
    from tools.bench.gpu.process import Part, run

    def part(name, measure):
        module = types.ModuleType(f"tools.bench.gpu.parts.{name}")
        module.measure = measure
        sys.modules[module.__name__] = module
        return Part(name, "", 1.0)

    null = subprocess.DEVNULL

    def slow(setting):
        sleeper = subprocess.Popen(["sleep", "600"], stdout=null, stderr=null)
        yield {"table": "t", "pid": sleeper.pid}
        time.sleep(600)

    def dies(setting):
        yield {"table": "t"}
        os._exit(3)

    def raises(setting):
        yield {"table": "t"}
        raise ValueError("something")

    def needs(setting):
        import no_such_package
        yield

    for name, measure in (("a", slow), ("b", dies), ("c", raises), ("d", needs)):
        kept = []
        report = run(part(name, measure), lambda: None, 1.0, kept.append)
        assert kept == report.rows
        print(json.dumps([report.status, kept]))
    """
)


def test_after_a_part_that_times_out_crashes_fails_or_lacks_a_package_the_next_one_runs():
    command = [sys.executable, "-c", FRAME]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (late, left), *others = map(json.loads, done.stdout.splitlines())
    assert late == "cut after its 1 s"
    assert not runs(left[0]["pid"]), "what a part had started outlives it"
    assert others == [
        ["failed: its process ended with 3", [{"table": "t"}]],
        ["failed: ValueError: something", [{"table": "t"}]],
        ["skipped: no_such_package is not installed", []],
    ]
