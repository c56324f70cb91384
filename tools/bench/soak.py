"""Check for leaks: memory, descriptors and threads of each process under a steady load with tiers.

    python -m tools.bench.soak [--minutes 30] [--share 0.7] [--opening 384] [--pages 160]

A router, a prefill node and a decode node run on this machine's cores, with random weights of
Qwen3's shape. Their page pools and their host memory are too small for the requested documents.
Files are the tier below. First the bench measures the throughput with `--clients` clients in a
closed loop. Then `--share` of that rate arrives as a Poisson process for `--minutes`. The first
quarter is left out, because caches and allocators fill.

A figure is flat if its median grows by no more than this from the second quarter to the last: a
twentieth and 8 MiB for memory, 2 for descriptors and for threads.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, children_of
from tools.bench.support import record
from tools.bench.support.models import QWEN3_450M

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
GROWTH = {"rss_mib": (1.05, 8.0), "descriptors": (1.0, 2.0), "threads": (1.0, 2.0)}


@dataclass(slots=True)
class _Load:
    cluster: Cluster
    documents: Sequence[Sequence[int]]
    draw: Random
    answer: int
    num_done: int = 0
    failures: list[str] = field(default_factory=list)

    async def one(self) -> None:
        """Ask a question about one of the documents. Only the length of the response matters."""
        document = self.draw.choice(self.documents)
        prompt = [*document, *self.draw.choices(range(2, 250), k=self.draw.randrange(8, 64))]
        try:
            answer = await self.cluster.generate(prompt, max_tokens=self.answer, ignore_eos=True)
            if len(answer.token_ids) != self.answer:
                self.failures.append(f"an answer has {len(answer.token_ids)} tokens")
        except Exception as error:  # noqa: BLE001 - whatever it is, the run says so
            self.failures.append(repr(error))
        self.num_done += 1

    async def without_pause(self, seconds: float, clients: int) -> float:
        """Run a closed loop. Returns the responses per second."""
        began, before = time.monotonic(), self.num_done

        async def client() -> None:
            while time.monotonic() - began < seconds:
                await self.one()

        await asyncio.gather(*(client() for _ in range(clients)))
        return (self.num_done - before) / (time.monotonic() - began)

    async def steadily(self, rate: float, until: float) -> None:
        async with asyncio.TaskGroup() as asked:
            while time.monotonic() < until:
                asked.create_task(self.one())
                await asyncio.sleep(self.draw.expovariate(rate))


def _sample(programs: Mapping[str, int]) -> dict[str, dict[str, float]]:
    return {name: _of_process(Path(f"/proc/{pid}")) for name, pid in programs.items()}


def _of_process(place: Path) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    return {
        "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
        "descriptors": float(len(list((place / "fd").iterdir()))),
        "threads": float(status["Threads"]),
    }


def _programs(cluster: Cluster) -> dict[str, int]:
    """Return the pid of every process by name."""
    named = {"router": cluster.router_pid}
    for at, pid in enumerate(children_of(cluster.router_pid)):
        named[f"router's {at}"] = pid
    for node in cluster.nodes:
        named[node.program.name] = node.child.pid
        for pid in children_of(node.child.pid):
            named[f"{node.program.name}'s engine"] = pid
    return named


async def measure(options: argparse.Namespace) -> tuple[_Load, list[dict[str, Any]], float]:
    draw = Random(11)
    documents = [draw.choices(range(2, 250), k=options.opening) for _ in range(options.documents)]
    samples: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as directory:
        flags = (
            f"--engine.cache.num-pages={options.pages}",
            "--engine.threads=1",
            f"--engine.offload.cpu-bytes={options.host_mib << 20}",
            f"--engine.offload.disk-dir={directory}/pages",
            f"--engine.offload.disk-bytes={options.file_mib << 20}",
        )
        model = make_checkpoint(Path(directory) / "model", **MODEL)
        async with Cluster(model, Path(directory) / "logs", node_flags=flags) as cluster:
            load = _Load(cluster, documents, draw, options.answer)
            most = await load.without_pause(CALIBRATION_S, options.clients)
            record.say(f"{most:.2f} requests a second without a pause")
            programs, until = _programs(cluster), time.monotonic() + 60 * options.minutes

            async def watch() -> None:
                while time.monotonic() < until:
                    samples.append(_sample(programs))
                    await asyncio.sleep(SAMPLE_S)

            await asyncio.gather(load.steadily(options.share * most, until), watch())
            samples.append(_sample(programs))
    return load, _rows(samples), most


def _rows(samples: Sequence[Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.7, help="of what they can")
    parser.add_argument("--clients", type=int, default=8, help="while that is found out")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--opening", type=int, default=384, help="tokens of a document")
    parser.add_argument("--answer", type=int, default=16, help="tokens")
    parser.add_argument("--pages", type=int, default=160, help="of 16 tokens, on the device")
    parser.add_argument("--host-mib", type=int, default=32)
    parser.add_argument("--file-mib", type=int, default=512)
    options = parser.parse_args()
    load, rows, most = asyncio.run(measure(options))
    columns = {"": "{program}", "MiB": "{rss_mib_before:.0f}", "at last": "{rss_mib_after:.0f}"}
    columns |= {"descriptors": "{descriptors_before:.0f}", "then": "{descriptors_after:.0f}"}
    columns |= {"threads": "{threads_before:.0f}", "later": "{threads_after:.0f}", "flat": "{flat}"}
    record.table(rows, columns)
    record.say(f"{load.num_done} requests, {len(load.failures)} failed: {load.failures[:3]}")
    flat = all(row["flat"] for row in rows)
    record.emit(
        "soak",
        vars(options),
        rows,
        rate=round(most, 2),
        requests=load.num_done,
        failed=len(load.failures),
        flat=flat,
    )
    if not flat or load.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
