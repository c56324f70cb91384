"""Compares a real cluster of one prefill and one decode node on CPUs with its prediction.

The rounds alternate: step times by `baton bench steps`, then the real cluster. Other load only
makes both slower, so the minimum of each step and of each figure is used. `baton sim` then uses the
minimum step times.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from simulation.cost.measured import MeasuredStep, StepTable
from simulation.virtual.scenario import ClusterSpec, LoadSpec, Scenario
from tools.bench.simulation.clocks import FIGURES, ask, in_virtual_time
from tools.bench.support.load import summary
from tools.bench.support.models import QWEN3_450M, kept
from tools.bench.support.record import say, table
from tools.bench.support.systems import as_up

MODEL: dict[str, Any] = QWEN3_450M | {  # 34 million parameters
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
LOAD = LoadSpec(rate=2.0, input=200, output=40, requests=40)
_ROWS, _REPEATS = (1, 2, 4, 8, 16), 6
_FLAGS = ("--device=cpu", "--engine.threads=1")
COLUMNS = {
    "figure": "{figure}",
    "simulated ms": "{simulated:.2f}",
    "real ms": "{real:.2f}",
    "ratio": "{ratio:.2f}",
    "real ms by round": "{rounds}",
    "load average": "{load_average}",
}
GOALS = {"ttft_ms": 0.3, "tpot_ms": 0.2}


async def measure(directory: Path, models: Path, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each figure."""
    model = kept(models, "qwen3-34m", torch.bfloat16, MODEL)
    steps = directory / "steps.json"
    cluster = ClusterSpec(gpu=str(steps), model=str(model), prefill=1, decode=1, path="tcp100")
    scenario = Scenario(cluster=cluster, load=LOAD)
    arrivals = list(scenario.arrivals())
    tables, found, loads = list[StepTable](), list[dict[str, Any]](), list[float]()
    for _ in range(rounds):
        _time_steps(model, steps)
        tables.append(StepTable.read(steps))
        async with as_up("disaggregated", model, _FLAGS[1:]) as system:
            await ask(system, arrivals[:4])  # warm-up
            found.append(summary(await ask(system, arrivals)))
        loads.append(round(os.getloadavg()[0], 1))
    steps.write_bytes(msgspec.json.encode(_least(tables)))
    simulated = in_virtual_time(scenario, directory)
    rows = []
    for figure in FIGURES:
        real = [each[figure]["p50"] for each in found]
        row = {"figure": figure, "simulated": simulated[figure], "real": min(real)}
        rows.append(row | {"rounds": real, "load_average": loads})
    return [row | {"ratio": row["simulated"] / row["real"]} for row in rows]


def _least(tables: Sequence[StepTable]) -> StepTable:
    """Return a table with the minimum time of each kind of step."""
    least: dict[tuple[str, int, int, int], MeasuredStep] = {}
    for step in chain.from_iterable(each.steps for each in tables):
        kind = (step.mode, step.tokens, step.rows, step.context)
        if kind not in least or step.seconds < least[kind].seconds:
            least[kind] = step
    return msgspec.structs.replace(tables[0], steps=tuple(least.values()))


def _time_steps(model: Path, file: Path) -> None:
    """Time a few steps together, each kind several times, so that some are not interrupted."""
    rows = ",".join(str(number) for number in _ROWS for _ in range(_REPEATS))
    sizes = (f"--rows={rows}", "--contexts=64,256", "--steps=4", "--prompts=64,128,200,400")
    command = (sys.executable, "-m", "cli.main", "bench", "steps", f"--model={model}", *_FLAGS)
    subprocess.run((*command, *sizes, f"--out={file}"), check=True, stdout=subprocess.DEVNULL)


def show(rows: list[dict[str, Any]]) -> None:
    table(rows, COLUMNS)
    for row in rows:
        if goal := GOALS.get(row["figure"]):
            say(f"{row['figure']}: simulated over real {row['ratio']:.2f} (goal 1 +- {goal:g})")
