"""Compares virtual time with clusters on the real clock.

The cluster of `compare_clocks` has simulated nodes, started like `baton up`. Its model is so slow
that the processors are mostly idle.

The cluster of `compare_predictions` has a real prefill and a real decode node on CPUs. The rounds
alternate: step times by `baton bench steps`, then the cluster. Other load only makes both slower,
so the minimum of each step and of each figure counts. `baton sim` uses the minimum step times.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from bench.traffic.load import LoadGenerator, RequestOutcome
from bench.traffic.workload import WorkloadRequest
from simulation.cost.measured import MeasuredStep, StepTable
from simulation.node.tokenizer import write_model_files
from simulation.virtual.process import command, environment
from simulation.virtual.scenario import Arrival, ClusterSpec, LoadSpec, Scenario
from tools.bench.support.load import Client, summary
from tools.bench.support.models import QWEN3_450M, kept
from tools.bench.support.record import say, show
from tools.bench.support.systems import System, as_up

FIGURES = ("ttft_ms", "itl_ms", "tpot_ms")
GOALS = {"ttft_ms": 0.3, "tpot_ms": 0.2}  # of predictions: simulated over real, 1 +- goal

_TP: Final = 2
SLOW = Scenario(
    cluster=ClusterSpec(
        gpu="h100", model="llama-3-70b", prefill=1, decode=1, prefill_tp=_TP, decode_tp=_TP
    ),
    load=LoadSpec(rate=0.6, input=6000, output=40, requests=40),
)
SMALL_MODEL: dict[str, Any] = QWEN3_450M | {  # 34 million parameters
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SMALL_LOAD = LoadSpec(rate=2.0, input=200, output=40, requests=40)
_STEP_ROWS, _STEP_REPEATS = (1, 2, 4, 8, 16), 6
_ONE_THREAD = "--engine.threads=1"


async def compare_clocks(directory: Path) -> list[dict[str, Any]]:
    """Return a row for each figure of one scenario. `directory`: for files."""
    virtual = _medians(SLOW, directory)
    files = directory / "files"
    write_model_files(SLOW.cluster.model, files)
    async with as_up(
        "disaggregated",
        SLOW.cluster.model,
        (f"--engine.parallel.tp={_TP}", f"--engine.sim.pool-dir={directory / 'pools'}"),
        device=f"sim:{SLOW.cluster.gpu}",
        router_model=str(files),
    ) as system:
        measured = summary(await _ask(system, list(SLOW.arrivals())))
    real = {figure: measured[figure]["p50"] for figure in FIGURES}
    return [
        {
            "figure": f"{figure} p50",
            "virtual": virtual[figure],
            "real": real[figure],
            "ratio": virtual[figure] / real[figure],
        }
        for figure in FIGURES
    ]


async def compare_predictions(directory: Path, models: Path, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each figure."""
    model = kept(models, "qwen3-34m", torch.bfloat16, SMALL_MODEL)
    steps = directory / "steps.json"
    cluster = ClusterSpec(gpu=str(steps), model=str(model), prefill=1, decode=1, path="tcp100")
    scenario = Scenario(cluster=cluster, load=SMALL_LOAD)
    arrivals = list(scenario.arrivals())
    tables, found, loads = list[StepTable](), list[dict[str, Any]](), list[float]()
    for _ in range(rounds):
        _time_steps(model, steps)
        tables.append(StepTable.read(steps))
        async with as_up("disaggregated", model, (_ONE_THREAD,)) as system:
            await _ask(system, arrivals[:4])  # warm-up
            found.append(summary(await _ask(system, arrivals)))
        loads.append(round(os.getloadavg()[0], 1))
    steps.write_bytes(msgspec.json.encode(_least(tables)))
    simulated = _medians(scenario, directory)
    rows = []
    for figure in FIGURES:
        real = [each[figure]["p50"] for each in found]
        row = {"figure": figure, "simulated": simulated[figure], "real": min(real)}
        ratio = simulated[figure] / min(real)
        rows.append({**row, "rounds": real, "load_average": loads, "ratio": ratio})
    return rows


def show_predictions(rows: list[dict[str, Any]]) -> None:
    show(rows)
    for row in rows:
        if goal := GOALS.get(row["figure"]):
            say(f"{row['figure']}: simulated over real {row['ratio']:.2f} (goal 1 +- {goal:g})")


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
    rows = ",".join(str(number) for number in _STEP_ROWS for _ in range(_STEP_REPEATS))
    sizes = (f"--rows={rows}", "--contexts=64,256", "--steps=4", "--prompts=64,128,200,400")
    flags = (f"--model={model}", "--device=cpu", _ONE_THREAD, *sizes, f"--out={file}")
    bench = (sys.executable, "-m", "cli.main", "bench", "steps", *flags)
    subprocess.run(bench, check=True, stdout=subprocess.DEVNULL)


def _medians(scenario: Scenario, directory: Path) -> dict[str, float]:
    """Run a scenario in virtual time. Returns the medians of FIGURES."""
    report = simulate(scenario, directory)
    return {figure: 1e3 * report[figure.removesuffix("_ms")]["p50"] for figure in FIGURES}


def simulate(scenario: Scenario, directory: Path) -> Any:
    """Run a scenario like `baton sim`. Returns its report."""
    file = directory / "sim.yaml"
    file.write_bytes(msgspec.json.encode(scenario))
    run = command(str(file), program="cli.virtual")
    done = subprocess.run(run, env=environment(), stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit("baton sim failed")
    return msgspec.json.decode(done.stdout)


async def _ask(system: System, arrivals: Sequence[Arrival]) -> list[RequestOutcome]:
    """Send requests to a real cluster, each at its time."""
    jobs = [WorkloadRequest(tuple(each.prompt), each.output) for each in arrivals]
    async with Client(system.target) as client:
        load = LoadGenerator(client.ask)
        async with load.measuring():
            due = (each.at for each in arrivals)
            await load.open_loop(iter(jobs), due, max_in_flight=len(jobs))
    failed = [outcome.error for outcome in load.run.outcomes if outcome.error]
    if failed:
        say(f"  {len(failed)} requests failed: {failed[0]}")
    return load.run.outcomes
