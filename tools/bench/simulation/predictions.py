"""A real cluster of one prefill and one decode node on this machine's processors, against its
prediction from measured step times.

The rounds alternate: step times by `baton bench steps`, then the real cluster, then `baton sim`
with those step times. A ratio belongs to one round.
"""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

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
_FLAGS = ("--device=cpu", "--engine.threads=1")
COLUMNS = {
    "round": "{round}",
    "load average": "{load_average:.1f}",
    "figure": "{figure}",
    "simulated ms": "{simulated:.2f}",
    "real ms": "{real:.2f}",
    "ratio": "{ratio:.2f}",
}
GOALS = {"ttft_ms": 0.3, "tpot_ms": 0.2}


async def measure(directory: Path, models: Path, rounds: int) -> AsyncIterator[dict[str, Any]]:
    """Yield a row for each figure of each round."""
    model = kept(models, "qwen3-34m", torch.bfloat16, MODEL)
    steps = directory / "steps.json"
    for number in range(rounds):
        _time_steps(model, steps)
        cluster = ClusterSpec(gpu=str(steps), model=str(model), prefill=1, decode=1, path="tcp100")
        scenario = Scenario(cluster=cluster, load=LOAD)
        async with as_up("disaggregated", model, _FLAGS[1:]) as system:
            arrivals = list(scenario.arrivals())
            await ask(system, arrivals[:4])  # warm-up
            real = summary(await ask(system, arrivals))
        simulated = in_virtual_time(scenario, directory)
        for figure in FIGURES:
            yield {
                "round": number,
                "load_average": os.getloadavg()[0],
                "figure": figure,
                "simulated": simulated[figure],
                "real": real[figure]["p50"],
                "ratio": simulated[figure] / real[figure]["p50"],
            }


def _time_steps(model: Path, file: Path) -> None:
    sizes = ("--rows=1,2,4,8,16", "--contexts=64,256", "--prompts=16,64,128,200,256,512")
    command = (sys.executable, "-m", "cli.main", "bench", "steps", f"--model={model}", *_FLAGS)
    subprocess.run((*command, *sizes, f"--out={file}"), check=True, stdout=subprocess.DEVNULL)


def show(rows: list[dict[str, Any]]) -> None:
    table(rows, COLUMNS)
    for figure, goal in GOALS.items():
        ratio = median(row["ratio"] for row in rows if row["figure"] == figure)
        say(f"{figure}: simulated over real {ratio:.2f} (goal 1 +- {goal:g})")
