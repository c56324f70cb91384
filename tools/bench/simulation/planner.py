"""Compares the planner with fixed splits over a short day in virtual time.

The load changes from long prompts with short responses to short prompts with long responses, and
back. The planner starts with an equal split.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simulation.virtual.scenario import ClusterSpec, LatencyLimits, LoadSpec, PlannerSpec, Scenario
from tools.bench.simulation.clocks import simulate
from tools.bench.support.record import say, table

DAY_S = 400.0
NODES = 4
_RATE = 2.0  # requests/s
_BY_DAY, _BY_NIGHT = (9000, 30), (300, 500)  # tokens of prompts and responses
_ROWS = 8  # running requests of a node, few so that a node reaches its limit
LIMITS = LatencyLimits(ttft=3.0, tpot=0.06)
# The day is short, so the planner acts sooner than by default.
PLANNER = PlannerSpec(sustained_s=6.0, settle_s=10.0, running=_ROWS)
COLUMNS = {
    "split": "{split}",
    "goodput req/s": "{goodput:.2f}",
    "within the limits": "{share:.1%}",
    "TTFT p90 s": "{ttft:.2f}",
    "TPOT p90 ms": "{tpot:.1f}",
}


def day(seed: int) -> Iterator[Mapping[str, float]]:
    """Yield the lines of a trace with night in the middle."""
    rng, at = random.Random(seed), 0.0
    while (at := at + rng.expovariate(_RATE)) < DAY_S:
        night = (1 - math.cos(2 * math.pi * at / DAY_S)) / 2  # share of night requests
        sizes = _BY_NIGHT if rng.random() < night else _BY_DAY
        prompt, response = (max(1, round(size * rng.uniform(0.5, 1.5))) for size in sizes)
        yield {"timestamp": 1e3 * at, "input_length": prompt, "output_length": response}


def measure(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each split, and for the planner."""
    trace = directory / "day.jsonl"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in day(seed=1)))
    for prefill in range(1, NODES):
        yield _row(f"{prefill} prefill + {NODES - prefill} decode", prefill, None, trace)
    yield _row("planner", NODES // 2, PLANNER, trace)


def _row(name: str, prefill: int, planner: PlannerSpec | None, trace: Path) -> dict[str, Any]:
    cluster = ClusterSpec(
        gpu="h200",
        model="llama-3.1-70b",
        prefill=prefill,
        decode=NODES - prefill,
        prefill_tp=2,
        decode_tp=2,
        options={"engine.scheduler.max_running_requests": _ROWS},
    )
    load = LoadSpec(trace=str(trace))
    scenario = Scenario(cluster=cluster, load=load, planner=planner, limits=LIMITS)
    report = simulate(scenario, trace.parent)
    share = report["goodput"] * report["seconds"] / report["requests"]
    say(f"  {name}: {share:.1%} within the limits")
    return {
        "split": name,
        "goodput": report["goodput"],
        "share": share,
        "ttft": report["ttft"]["p90"],
        "tpot": 1e3 * report["tpot"]["p90"],
        "roles": report["roles"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    table(rows, COLUMNS)
    *fixed, planned = rows
    best = max(fixed, key=lambda row: row["goodput"])
    ratio = planned["goodput"] / best["goodput"]
    say(f"Goodput of the planner over that of the best fixed split, {best['split']}: {ratio:.2f}")
