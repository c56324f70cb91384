"""Compares the layouts of `baton plan`, and the decisions of `baton planner`, with virtual time."""

import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from simulation.plan import Hardware, LatencyTargets, Traffic, make_plan
from simulation.verification import verify
from simulation.virtual.scenario import ClusterSpec, LatencyLimits, LoadSpec, PlannerSpec, Scenario
from tools.bench.simulation.real_clusters import simulate
from tools.bench.support.record import say, show

_NUM_LAYOUTS = 3  # run of each plan. The best of each kind are always included
_LIMIT_S = 300.0  # for each plan
_SHOWN_RATE = 1.0  # rate of the forecast, which is not compared


class PlannedLoad(NamedTuple):
    """Requests of one length for a cluster, with latency limits in seconds."""

    gpus: int
    input: int
    output: int
    ttft: float
    tpot: float
    gpu: str = "h100"
    model: str = "llama-3-8b"
    path: str = "rdma400"

    @property
    def name(self) -> str:
        return (
            f"{self.gpus} x {self.gpu}, {self.model}, {self.input} in, {self.output} out, "
            f"TTFT {self.ttft:g} s, TPOT {1e3 * self.tpot:g} ms, {self.path}"
        )


LOADS = (
    PlannedLoad(4, 2000, 100, 0.5, 0.012),
    PlannedLoad(4, 2000, 100, 0.5, 0.03),
    PlannedLoad(4, 500, 100, 0.3, 0.010),
    PlannedLoad(4, 500, 200, 0.3, 0.015),
    PlannedLoad(4, 4000, 60, 1.0, 0.015),
    PlannedLoad(4, 6000, 100, 1.0, 0.012),
    PlannedLoad(4, 1000, 100, 0.3, 0.012, path="tcp25"),
    PlannedLoad(4, 2000, 80, 0.5, 0.012, gpu="h200"),
    PlannedLoad(4, 1000, 60, 0.3, 0.012, model="qwen3-8b"),
    PlannedLoad(8, 4000, 60, 0.5, 0.012),
)


def compare_plans() -> Iterator[dict[str, Any]]:
    """Yield a row for each load: the best layout by closed forms and in virtual time."""
    for load in LOADS:
        hardware = Hardware(load.gpus, load.gpu, load.model, load.path)
        traffic = Traffic.uniform(_SHOWN_RATE, load.input, load.output)
        targets = LatencyTargets(load.ttft, load.tpot)
        begin = time.monotonic()
        plan = make_plan(hardware, traffic, targets)
        found = verify(
            plan, hardware, traffic, targets, count=_NUM_LAYOUTS, limit_s=_LIMIT_S
        ).layouts
        layouts = [
            (one.candidate.layout.name, one.candidate.capacity, one.capacity) for one in found
        ]
        for name, capacity, virtual in layouts:
            say(f"  {name}: {capacity:.1f}, in virtual time {virtual}")
        best, by_closed_form = found[0], max(found, key=lambda one: one.candidate.capacity)
        yield {
            "load": load.name,
            "closed_form": by_closed_form.candidate.layout.name,
            "closed_form_rate": by_closed_form.candidate.capacity,
            "closed_form_virtual": by_closed_form.capacity or 0.0,
            "virtual": best.candidate.layout.name,
            "virtual_rate": best.capacity or 0.0,
            "agree": "tie" if by_closed_form.tie else "yes" if by_closed_form is best else "no",
            "layouts": layouts,
            "seconds": time.monotonic() - begin,
        }


def show_plans(rows: list[dict[str, Any]]) -> None:
    show([{name: row[name] for name in row if name != "layouts"} for row in rows])
    agreeing = sum(row["agree"] != "no" for row in rows)
    say(f"Closed form and virtual time agree in {agreeing} of {len(rows)} loads (goal: 8 of 10).")


# A short day for the planner. The load changes from long prompts with short responses to short
# prompts with long responses, and back.
DAY_S = 400.0
NODES = 4
_RATE = 2.0  # requests/s
_BY_DAY, _BY_NIGHT = (9000, 30), (300, 500)  # tokens of prompts and responses
_ROWS = 8  # running requests of a node, few so that a node reaches its limit
LIMITS = LatencyLimits(ttft=3.0, tpot=0.06)
# The day is short, so the planner acts sooner than by default.
PLANNER = PlannerSpec(sustained_s=6.0, settle_s=10.0, running=_ROWS)


def _day(seed: int) -> Iterator[Mapping[str, float]]:
    """Yield the lines of a trace with night in the middle."""
    rng, at = random.Random(seed), 0.0
    while (at := at + rng.expovariate(_RATE)) < DAY_S:
        night = (1 - math.cos(2 * math.pi * at / DAY_S)) / 2  # share of night requests
        sizes = _BY_NIGHT if rng.random() < night else _BY_DAY
        prompt, response = (max(1, round(size * rng.uniform(0.5, 1.5))) for size in sizes)
        yield {"timestamp": 1e3 * at, "input_length": prompt, "output_length": response}


def compare_splits(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each fixed split, and for the planner, which starts with an equal one."""
    trace = directory / "day.jsonl"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in _day(seed=1)))
    for prefill in range(1, NODES):
        yield _split(f"{prefill} prefill + {NODES - prefill} decode", prefill, None, trace)
    yield _split("planner", NODES // 2, PLANNER, trace)


def _split(name: str, prefill: int, planner: PlannerSpec | None, trace: Path) -> dict[str, Any]:
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


def show_splits(rows: list[dict[str, Any]]) -> None:
    show(rows)
    *fixed, planned = rows
    best = max(fixed, key=lambda row: row["goodput"])
    ratio = planned["goodput"] / best["goodput"]
    say(f"Goodput of the planner over that of the best fixed split, {best['split']}: {ratio:.2f}")
