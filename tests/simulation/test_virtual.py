"""`baton sim`: clusters in virtual time, from outside."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simulation.virtual.scenario import read
from tests.support.isolation import ROOT

EXAMPLE = ROOT / "docs" / "assets" / "sim.yaml"
SMALL = """
cluster: {gpu: h100, model: llama-3-8b, prefill: 1, decode: 1}
load: {rate: 20, input: 100, output: 5, requests: 6}
"""


def baton_sim(*arguments: str, hash_seed: str = "1") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cli.main", "sim", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def report(file: Path, hash_seed: str = "1") -> Any:
    done = baton_sim(str(file), "--json", hash_seed=hash_seed)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def written(directory: Path, text: str) -> Path:
    file = directory / "sim.yaml"
    file.write_text(text)
    return file


def test_a_run_repeats_exactly_in_another_process(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL)
    first, second = report(file, "1"), report(file, "2")
    assert first == second
    assert (first["right"], first["wrong"], first["errors"]) == (6, 0, {})
    assert first["simulated"] and first["band"] > 0
    assert 0 < first["itl"]["p50"] < first["ttft"]["p50"] < 1


@pytest.mark.long
def test_a_killed_decode_node_loses_no_request() -> None:
    found = report(EXAMPLE)
    assert (found["right"], found["wrong"], found["errors"]) == (40, 0, {})
    busy = found["utilization"]
    assert 0 < busy["decode/1"] < busy["decode/0"], "it ended before the other one"


@pytest.mark.long
def test_colocated_nodes_and_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = ({"timestamp": 50 * i, "input_length": 40 + i, "output_length": 4} for i in range(9))
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    cluster = "cluster: {gpu: h200, model: llama-3-8b, colocated: 2}"
    file = written(tmp_path, f"{cluster}\nload: {{trace: {trace}, requests: 8}}\npolicy: random")
    assert report(file)["right"] == 8


@pytest.mark.long
def test_another_seed_gives_other_times(tmp_path: Path) -> None:
    first = report(written(tmp_path, SMALL))
    second = report(written(tmp_path, f"{SMALL}seed: 2"))
    assert second["right"] == 6 and second["hash"] != first["hash"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("planner: true", "planner"),
        ("policy: best", "best"),
        ("faults: [{kill: decode/7, at: 1}]", "decode/7"),
        ("faults: [{freeze: decode/0, at: 1}]", "freeze"),
        ("cluster: {gpu: h100, model: llama-3-8b, decode: 1}", "prefill"),
        ("cluster: {gpu: h100, model: llama-3-8b, colocated: 1, tp: 2}", "tp"),
        ("load: {rate: 1, input: 5, output: 5}", "requests"),
        ("load: {trace: x, rate: 1}", "load.rate"),
    ],
)
def test_unsupported_keys_are_refused_by_name(tmp_path: Path, line: str, named: str) -> None:
    file = written(tmp_path, f"{SMALL}{line}\n")
    with pytest.raises(ValueError, match=named):
        read(file)


@pytest.mark.long
def test_an_invalid_file_is_a_usage_error(tmp_path: Path) -> None:
    done = baton_sim(str(written(tmp_path, f"{SMALL}planner: true")))
    assert done.returncode == 2
    assert done.stderr.startswith("baton sim: ") and "planner" in done.stderr
