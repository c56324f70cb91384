"""Measure the time of an all-reduce between GPUs by NCCL, alone and in a CUDA graph.

    python -m tools.bench.gpu.collectives [--ranks 2] [--dry]

Each rank is a process with a GPU. Tensors are bfloat16 [rows, 8192]. The floor is a copy of the
tensor from one GPU to another, because each rank must receive the bytes of the others. The dry mode
rehearses this on a CPU with gloo, and its times mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.ranks.meeting import LoopbackMeeting
from engine.ranks.torch_group import TorchGroup
from tools.bench.support import record

COLUMNS = 8192  # hidden size of a model with 70 billion parameters
ROWS, DRY_ROWS = (1, 16, 64, 256, 2048), (1, 16)
CALLS = 50  # calls in one run
RUNS = 5
TIMEOUT_S = 60.0


def measure(size: int, dry: bool) -> list[dict[str, Any]]:
    """Start the ranks. Return rank 0's figures."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tools.bench.gpu.collectives", "--ranks", str(size)]
        command += ["--store", str(Path(directory) / "store"), *(["--dry"] if dry else [])]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(size)
        ]
        output, _ = ranks[0].communicate()
        failed = [rank for rank, program in enumerate(ranks) if program.wait()]
    if failed:
        raise SystemExit(f"ranks {failed} failed")
    rows: list[dict[str, Any]] = json.loads(output)
    return rows


def run_rank(rank: int, size: int, store: Path, dry: bool) -> None:
    """Execute the calls of one rank, and print its figures."""
    device = torch.device("cpu") if dry else torch.device("cuda", rank)
    if not dry:
        torch.cuda.set_device(device)
    meeting = LoopbackMeeting(store.parent)
    group = TorchGroup("gloo" if dry else "nccl", rank, size, meeting, store.name, TIMEOUT_S)
    rows = []
    with torch.inference_mode():
        for count in DRY_ROWS if dry else ROWS:
            x = torch.full((count, COLUMNS), float(rank), dtype=torch.bfloat16, device=device)
            total = group.all_reduce(x.clone())
            if not bool((total == sum(range(size))).all()):
                raise SystemExit(f"the sum of {count} rows is wrong")
            zeros = torch.zeros_like(x)  # zeros, whose sums stay finite
            figures = {"rows": count, "kib": x.nbytes / 1024}
            figures["eager_us"] = _us(partial(group.all_reduce, zeros), device)
            if not dry:
                figures["graph_us"] = _us(_graph(group, zeros), device, calls=1) / CALLS
            if rank == 0 and not dry:
                there = torch.empty_like(x, device=torch.device("cuda", 1))
                figures["copy_us"] = _us(partial(there.copy_, x), device)
            rows.append(figures)
    print(json.dumps(rows), flush=True)
    os._exit(0)  # otherwise NCCL may wait for graphs


def _graph(group: TorchGroup, x: Tensor) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            group.all_reduce(x)
    return graph.replay


def _us(work: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Return the microseconds per call, of the best run."""
    best = float("inf")
    for _ in range(RUNS):
        _finish(device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        _finish(device)
        best = min(best, time.perf_counter() - began)
    return best / calls * 1e6


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny sizes")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments.ranks, arguments.store, arguments.dry)
        return
    if not arguments.dry and torch.cuda.device_count() < arguments.ranks:
        raise SystemExit(f"{arguments.ranks} ranks need as many CUDA devices")
    rows = measure(arguments.ranks, arguments.dry)
    columns = {"rows": "{rows}", "KiB": "{kib:.0f}", "eager us": "{eager_us:.1f}"}
    if not arguments.dry:
        columns |= {"in a graph us": "{graph_us:.1f}", "copy us": "{copy_us:.1f}"}
    record.table(rows, columns)
    record.emit("gpu.collectives", {"columns": COLUMNS, "ranks": arguments.ranks}, rows)


if __name__ == "__main__":
    main()
