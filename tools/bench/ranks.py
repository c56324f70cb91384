"""Measure decode steps of one engine with one rank and with two, as ratios.

    python -m tools.bench.ranks [--rows 1 8] [--steps 60] [--rounds 3] [--small]

The model has 449 million random weights in float32. Engines run one after the other, several times
in turn. A figure is the shortest step of all runs, because other work only makes steps longer.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch

from common.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from common.requests.sampling import SamplingParams
from engine.build import build
from engine.loop.loop import EventLoop
from tests.support.specs import make_request
from tools.bench.support import record
from tools.bench.support.models import QWEN3_450M, QWEN3_SMALL, kept

PROMPT_TOKENS = 64
# Ranks and threads of each rank.
KINDS = {"1 rank, 1 thread": (1, 1), "1 rank, 2 threads": (1, 2), "2 ranks": (2, 1)}


class _Decoding:
    """A role that has nothing but a scheduler, and notes when steps end."""

    def __init__(self, model: Path, ranks: int, threads: int, max_rows: int) -> None:
        config = EngineConfig(
            model=str(model),
            device="cpu",
            dtype="float32",
            threads=threads,
            parallel=ParallelConfig(tp=ranks),
            cache=CacheConfig(num_pages=32 * max_rows, swap_pages=0),
            scheduler=SchedulerConfig(max_running_requests=max_rows),
        )
        self.engine = build(config, "node.follower")
        self._scheduler = self.engine.scheduler(config, lambda request, holding: None)
        self._loop = EventLoop(self, self.engine.runner)
        self._ends: list[float] = []
        self._added = 0

    def poll(self) -> None:
        pass

    def next_batch(self) -> Any:
        return self._scheduler.next_batch()

    def finish(self, batch: Any, result: Any) -> None:
        self._scheduler.finish(batch, result)
        self._ends.append(time.perf_counter())

    def idle(self) -> None:
        pass

    def shortest_step_s(self, rows: int, steps: int) -> float:
        """Return the shortest time between the ends of two decode steps."""
        for number in range(rows):
            self._added += 1
            tokens = [1 + (self._added * 31 + place) % 200 for place in range(PROMPT_TOKENS)]
            sampling = SamplingParams(
                max_tokens=steps, temperature=0.0, ignore_eos=True, seed=number
            )
            self._scheduler.add(make_request(tokens, key=self._added, sampling=sampling))
        self._ends.clear()
        in_flight = None
        while self._scheduler.has_work or in_flight is not None:
            in_flight = self._loop.step(in_flight)
        decodes = self._ends[-(steps - 5) :]
        return min(later - earlier for earlier, later in itertools.pairwise(decodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a model of 3.5 MB, to try the bench")
    parser.add_argument("--models", type=Path, default=Path("build/bench-models"))
    options = parser.parse_args()
    name, sizes = ("qwen3-small", QWEN3_SMALL) if options.small else ("qwen3-450m", QWEN3_450M)
    model = kept(options.models, name, torch.float32, sizes)
    best: dict[tuple[str, int], float] = {}
    for _ in range(options.rounds):
        for kind, (ranks, threads) in KINDS.items():
            decoding = _Decoding(model, ranks, threads, max(options.rows))
            for rows in options.rows:
                found = decoding.shortest_step_s(rows, options.steps)
                best[kind, rows] = min(found, best.get((kind, rows), found))
            decoding.engine.close()
    lines = [
        {
            "rows": rows,
            "kind": kind,
            "step_ms": best[kind, rows] * 1e3,
            "to_one": best[kind, rows] / best["1 rank, 1 thread", rows],
            "to_two": best[kind, rows] / best["1 rank, 2 threads", rows],
        }
        for rows in options.rows
        for kind in KINDS
    ]
    columns = {
        "rows": "{rows}",
        "engine": "{kind}",
        "step ms": "{step_ms:.2f}",
        "to 1 thread": "{to_one:.2f}",
        "to 2 threads": "{to_two:.2f}",
    }
    record.table(lines, columns)
    record.emit("ranks", {"model": name, "steps": options.steps, "rounds": options.rounds}, lines)


if __name__ == "__main__":
    main()
