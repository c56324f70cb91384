"""Check for leaks: memory, descriptors and threads of each process under a steady load with tiers.

    python -m tools.bench.soak [--minutes 30] [--pages 160]

A router, a prefill node and a decode node run on this machine's cores, with random weights of
Qwen3's shape. Their page pools and their host memory are too small for the requested documents.
Files are the tier below. First the bench measures the throughput of a closed loop. Then a share of
that rate arrives as a Poisson process for `--minutes`. The first quarter is left out, because
caches and allocators fill.

A figure is flat if its median grows by no more than this from the second quarter to the last: a
twentieth and 8 MiB for memory, 2 for descriptors and for threads.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from bench.traffic.load import LoadGenerator, LoadRun, poisson, until
from bench.traffic.workload import WorkloadRequest
from tests.support.models.checkpoints import make_checkpoint
from tests.support.processes.cluster import children_of
from tools.bench.support.load import Client
from tools.bench.support.models import QWEN3_450M
from tools.bench.support.record import emit, parsed, say, show
from tools.bench.support.systems import System, serving

MODEL = QWEN3_450M | {  # 40 million parameters: a prompt token takes a third of a millisecond
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SAMPLE_S = 5.0
CALIBRATION_S = 30.0
CLIENTS = 8  # of the closed loop
SHARE = 0.7  # of its rate, which then arrives
NUM_DOCUMENTS, DOCUMENT_TOKENS, ANSWER_TOKENS = 16, 384, 16
HOST_BYTES, FILE_BYTES = 32 << 20, 512 << 20
GROWTH = {"rss_mib": (1.05, 8.0), "descriptors": (1.0, 2.0), "threads": (1.0, 2.0)}

Sample = dict[str, dict[str, float]]  # the figures of GROWTH by process


def _questions() -> Iterator[WorkloadRequest]:
    """Yield questions about one of the documents. Only the length of the responses matters."""
    draw = Random(11)
    documents = [draw.choices(range(2, 250), k=DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    while True:
        question = draw.choices(range(2, 250), k=draw.randrange(8, 64))
        yield WorkloadRequest((*draw.choice(documents), *question), ANSWER_TOKENS)


def _sample(pids: Mapping[str, int]) -> Sample:
    return {name: _of_process(Path(f"/proc/{pid}")) for name, pid in pids.items()}


def _of_process(place: Path) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    return {
        "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
        "descriptors": float(len(list((place / "fd").iterdir()))),
        "threads": float(status["Threads"]),
    }


async def _pids(system: System) -> dict[str, int]:
    """Return the pid of every process by name."""
    named = {"router": system.router_pid}
    for at, pid in enumerate(children_of(system.router_pid)):
        named[f"router's {at}"] = pid
    for node in await system.nodes():
        named |= {f"{node.role} process {at}": pid for at, pid in enumerate(node.pids)}
    return named


async def measure(minutes: float, pages: int) -> tuple[LoadRun, list[dict[str, Any]], float]:
    """Return the steady load, the row of each process, and the rate of the closed loop."""
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as directory:
        flags = (
            "--device=cpu",
            "--dtype=float32",
            f"--engine.cache.num-pages={pages}",
            "--engine.threads=1",
            f"--engine.offload.cpu-bytes={HOST_BYTES}",
            f"--engine.offload.disk-dir={directory}/pages",
            f"--engine.offload.disk-bytes={FILE_BYTES}",
        )
        model = make_checkpoint(Path(directory) / "model", **MODEL)
        router_flags = ("--max-queue-fraction=1",)  # no request is rejected for a long queue
        async with (
            serving("disaggregated", model, flags, router_flags=router_flags) as system,
            Client(system.target) as client,
        ):
            questions = _questions()
            closed, steady = LoadGenerator(client.ask), LoadGenerator(client.ask)
            async with closed.measuring():
                await closed.closed_loop(questions, concurrency=CLIENTS, duration_s=CALIBRATION_S)
            most = len(closed.run.outcomes) / closed.run.wall_s
            say(f"{most:.2f} requests a second without a pause")
            arrivals = until(poisson(SHARE * most, 1), count=None, duration_s=60 * minutes)
            samples, pids = list[Sample](), await _pids(system)
            watching = asyncio.create_task(_watch(pids, samples))
            async with steady.measuring():
                await steady.open_loop(questions, arrivals, max_in_flight=1024)
            watching.cancel()
            samples.append(_sample(pids))
    return steady.run, _rows(samples), most


async def _watch(pids: Mapping[str, int], samples: list[Sample]) -> None:
    while True:
        samples.append(_sample(pids))
        await asyncio.sleep(SAMPLE_S)


def _rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return each process's medians in the second and the last quarter, and if they are flat."""
    quarter = max(1, len(samples) // 4)
    rows = []
    for name in samples[0]:
        row: dict[str, Any] = {"program": name, "flat": True}
        for what, (times, more) in GROWTH.items():
            before, after = (
                statistics.median(each[name][what] for each in part)
                for part in (samples[quarter : 2 * quarter] or samples, samples[-quarter:])
            )
            row |= {f"{what}_before": round(before, 1), f"{what}_after": round(after, 1)}
            row["flat"] &= after <= before * times + more
        rows.append(row)
    return rows


def main() -> None:
    options = parsed(
        "soak",
        __doc__,
        ("--minutes", 30.0, "minutes of the steady load"),
        ("--pages", 160, "pages of 16 tokens on the device"),
    )
    load, rows, most = asyncio.run(measure(options.minutes, options.pages))
    show(rows)
    failed = [each for each in load.outcomes if each.output_tokens != ANSWER_TOKENS]
    flat = all(row["flat"] for row in rows)
    say(f"{load.begun} requests, {len(failed)} failed: {failed[:3]}")
    counts = {"rate": round(most, 2), "requests": load.begun, "failed": len(failed)}
    emit("soak", vars(options), rows, **counts, flat=flat)
    if not flat or failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
