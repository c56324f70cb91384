"""Compares the best layouts of `baton plan` by closed forms with virtual time."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from simulation.plan import Hardware, LatencyTargets, Traffic, make_plan
from simulation.verification import Verification, verify
from tools.bench.support.record import say, table

COLUMNS = {
    "load": "{load}",
    "best by closed form": "{closed_form}",
    "req/s": "{closed_form_rate:.1f}",
    "in virtual time": "{closed_form_virtual:.1f}",
    "best in virtual time": "{virtual}",
    "req/s ": "{virtual_rate:.1f}",
    "agree": "{agree}",
    "s": "{seconds:.0f}",
}


class Load(NamedTuple):
    """Requests of one length for a cluster, with latency limits in seconds."""

    gpus: int
    input: int
    output: int
    ttft: float
    tpot: float
    gpu: str = "h100"
    model: str = "llama-3-8b"
    path: str = "rdma400"


LOADS = (
    Load(4, 2000, 100, 0.5, 0.012),
    Load(4, 2000, 100, 0.5, 0.03),
    Load(4, 500, 100, 0.3, 0.010),
    Load(4, 500, 200, 0.3, 0.015),
    Load(4, 4000, 60, 1.0, 0.015),
    Load(4, 6000, 100, 1.0, 0.012),
    Load(4, 1000, 100, 0.3, 0.012, path="tcp25"),
    Load(4, 2000, 80, 0.5, 0.012, gpu="h200"),
    Load(4, 1000, 60, 0.3, 0.012, model="qwen3-8b"),
    Load(8, 4000, 60, 0.5, 0.012),
)
_SHOWN_RATE = 1.0  # rate of the forecast, which is not compared


def measure(count: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each load.

    Args:
        count: number of layouts to run. The best of each kind are always included.
        limit_s: time limit of each load, in seconds.
    """
    for load in LOADS:
        cluster = Hardware(load.gpus, load.gpu, load.model, load.path)
        traffic = Traffic.uniform(_SHOWN_RATE, load.input, load.output)
        objectives = LatencyTargets(load.ttft, load.tpot)
        begin = time.monotonic()
        plan = make_plan(cluster, traffic, objectives)
        found = verify(plan, cluster, traffic, objectives, count=count, limit_s=limit_s)
        yield _row(load, found) | {"seconds": time.monotonic() - begin}


def _row(load: Load, found: Verification) -> dict[str, Any]:
    by_closed_form = max(found.layouts, key=lambda each: each.candidate.capacity)
    best = found.layouts[0]
    name = (
        f"{load.gpus} x {load.gpu}, {load.model}, {load.input} in, {load.output} out, "
        f"TTFT {load.ttft:g} s, TPOT {1e3 * load.tpot:g} ms, {load.path}"
    )
    for each in found.layouts:
        layout, capacity = each.candidate.layout, each.capacity
        say(f"  {layout.name}: {each.candidate.capacity:.1f}, in virtual time {capacity}")
    return {
        "load": name,
        "closed_form": by_closed_form.candidate.layout.name,
        "closed_form_rate": by_closed_form.candidate.capacity,
        "closed_form_virtual": by_closed_form.capacity or 0.0,
        "virtual": best.candidate.layout.name,
        "virtual_rate": best.capacity or 0.0,
        "agree": "tie" if by_closed_form.tie else "yes" if by_closed_form is best else "no",
        "layouts": [
            (each.candidate.layout.name, each.candidate.capacity, each.capacity)
            for each in found.layouts
        ],
    }


def show(rows: list[dict[str, Any]]) -> None:
    table(rows, COLUMNS)
    agreeing = sum(row["agree"] != "no" for row in rows)
    say(f"Closed form and virtual time agree in {agreeing} of {len(rows)} loads (goal: 8 of 10).")
