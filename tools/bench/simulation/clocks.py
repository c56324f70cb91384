"""Compares one scenario in virtual time and on the real clock.

The real cluster consists of the same simulated nodes, started like `baton up`. Its model is so slow
that the processors are mostly idle.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.traffic.load import LoadGenerator
from bench.traffic.workload import WorkloadRequest
from simulation.node.tokenizer import write_model_files
from simulation.virtual.process import command, environment
from simulation.virtual.scenario import Arrival, ClusterSpec, LoadSpec, Scenario
from tools.bench.support.load import Answer, Client, summary
from tools.bench.support.record import say, table
from tools.bench.support.systems import System, as_up

_TP: Final = 2
SCENARIO = Scenario(
    cluster=ClusterSpec(
        gpu="h100", model="llama-3-70b", prefill=1, decode=1, prefill_tp=_TP, decode_tp=_TP
    ),
    load=LoadSpec(rate=0.6, input=6000, output=40, requests=40),
)
FIGURES = ("ttft_ms", "itl_ms", "tpot_ms")
COLUMNS = {
    "figure": "{figure}",
    "virtual": "{virtual:.2f}",
    "real": "{real:.2f}",
    "ratio": "{ratio:.3f}",
}


async def measure(directory: Path) -> list[dict[str, Any]]:
    """Return a row for each figure. `directory`: for files."""
    simulated = in_virtual_time(SCENARIO, directory)
    files = directory / "files"
    write_model_files(SCENARIO.cluster.model, files)
    flags = (f"--engine.parallel.tp={_TP}", f"--engine.sim.pool-dir={directory / 'pools'}")
    async with as_up(
        "disaggregated",
        SCENARIO.cluster.model,
        flags,
        device=f"sim:{SCENARIO.cluster.gpu}",
        router_model=str(files),
    ) as system:
        real = summary(await ask(system, list(SCENARIO.arrivals())))
    return [_row(figure, simulated, real) for figure in FIGURES]


def _row(figure: str, simulated: dict[str, Any], real: dict[str, Any]) -> dict[str, Any]:
    virtual, measured = simulated[figure], real[figure]["p50"]
    return {"figure": f"{figure} p50", "virtual": virtual, "real": measured} | {
        "ratio": virtual / measured
    }


def show(rows: list[dict[str, Any]]) -> None:
    table(rows, COLUMNS)


def in_virtual_time(scenario: Scenario, directory: Path) -> dict[str, float]:
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


async def ask(system: System, arrivals: Sequence[Arrival]) -> list[Answer]:
    """Send requests to a real cluster, each at its time."""
    jobs = [WorkloadRequest(tuple(each.prompt), each.output) for each in arrivals]
    answers: list[Answer] = []

    async with Client(system.target) as client:

        async def asked(job: WorkloadRequest, start: float, due: float) -> Answer:
            answers.append(answer := await client.ask(job, start, due))
            return answer

        load = LoadGenerator(asked)
        async with load.measuring():
            due = iter([each.at for each in arrivals])
            await load.open_loop(iter(jobs), due, max_in_flight=len(jobs))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        say(f"  {len(failed)} requests failed: {failed[0]}")
    return answers
