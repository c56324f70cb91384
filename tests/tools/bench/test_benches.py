"""Benchmarks run to their end with tiny sizes, because the code that they measure changes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.hardware.devices import need_invariant_products

ROOT = Path(__file__).resolve().parents[3]
SMALL = {
    "bits": ["--pairs", "16", "--seed", "1"],
    "collectives": ["--calls", "20"],
    "handoff": ["--parts", "cost", "exposure", "--handoffs=20", "--prompts=1"],
    "router": ["--no-peers", "--rounds=1", "--seconds=0.5", "--loads", "plain", "gRPC, 8 tokens"],
    "scheduler": ["--steps", "10"],
}


# The one of the router was seen failing with a decode node without heartbeats.
@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_bench_runs_and_ends_with_its_record(name: str) -> None:
    if name == "bits":
        need_invariant_products(torch.bfloat16)
    command = [sys.executable, "-m", f"tools.bench.{name}", *SMALL[name]]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    record = json.loads(ran.stdout.splitlines()[-1])
    assert record["bench"] == name and record["rows"]
    assert not any(row.get("failed") for row in record["rows"])
