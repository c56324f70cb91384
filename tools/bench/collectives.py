"""Measure the time of an all-reduce between ranks on one host.

    python -m tools.bench.collectives [--ranks 2] [--calls 2000]    in shared memory, and by gloo
    python -m tools.bench.collectives --gpu [--ranks 2]             by NCCL, alone and in a graph

Each rank is a process with one thread. Tensors are float32 [16, n], and with --gpu bfloat16
[n, 8192]. The figures are the minimum and the median over runs of one rank's calls. The floor of
NCCL is a copy of the tensor from one GPU to another: each rank must receive the others' bytes.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.ranks.group import Group
from engine.ranks.meeting import LoopbackMeeting
from engine.ranks.shm import SharedMemoryGroup, memory_bytes
from engine.ranks.torch_group import TorchBackend, TorchGroup
from tools.bench.support import record

SHAPES = tuple((16, columns) for columns in (128, 1024, 4096))
# 8192: hidden size of a model with 70 billion parameters.
GPU_SHAPES = tuple((rows, 8192) for rows in (1, 16, 64, 256, 2048))
GPU_CALLS = 50  # calls in one run, and in a graph
WARM_UP = 100
TIMEOUT_S = 60.0


def measure(kind: str, size: int, calls: int) -> list[dict[str, Any]]:
    """Start the ranks. Return rank 0's figures."""
    memory = os.memfd_create("ranks")
    os.truncate(memory, memory_bytes(size))
    with contextlib.ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        processes, sockets = [], []
        for rank in range(size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            place = [kind, str(rank), str(size), str(store), str(calls), str(theirs.fileno())]
            command = [sys.executable, "-m", "tools.bench.collectives", "--rank", *place]
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            with theirs:
                process = subprocess.Popen(command, stdout=pipe, pass_fds=[theirs.fileno()])
            processes.append(stack.enter_context(process))
            sockets.append(stack.enter_context(ours))
        pidfds = [os.pidfd_open(process.pid) for process in processes]
        for rank, ours in enumerate(sockets):
            others = pidfds[:rank] + pidfds[rank + 1 :]
            socket.send_fds(ours, [b"descriptors"], [memory, *others])
        for file in (memory, *pidfds):
            os.close(file)
        output, _ = processes[0].communicate()
        if failed := [rank for rank, process in enumerate(processes) if process.wait()]:
            raise SystemExit(f"ranks {failed} failed")
    rows: list[dict[str, Any]] = json.loads(output)
    return rows


def run_rank(kind: str, rank: int, size: int, store: Path, calls: int, descriptor: int) -> None:
    """Execute the calls of one rank, and print its figures."""
    torch.set_num_threads(1)
    with socket.socket(fileno=descriptor) as parent:
        _, (memory, *pidfds), _, _ = socket.recv_fds(parent, 64, 16)
    group: Group
    if kind == "shm":
        others = dict(zip((each for each in range(size) if each != rank), pidfds, strict=True))
        group = SharedMemoryGroup(rank, range(size), memory, others, TIMEOUT_S)
    else:
        meeting = LoopbackMeeting(store.parent)
        backend = cast(TorchBackend, kind)
        group = TorchGroup(backend, rank, size, meeting, store.name, TIMEOUT_S)
    with torch.inference_mode():
        rows = _on_gpu(group, rank, size) if kind == "nccl" else _on_cpu(group, kind, calls)
    print(json.dumps(rows), flush=True)
    os._exit(0)  # otherwise NCCL may wait for graphs


def _on_cpu(group: Group, kind: str, calls: int) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        x = torch.ones(shape)
        times = _times(partial(group.all_reduce, x), WARM_UP + calls)
        rows.append(_row(kind, x, times[WARM_UP:]))
    return rows


def _on_gpu(group: Group, rank: int, size: int) -> list[dict[str, Any]]:
    device, rows = torch.device("cuda", rank), []
    torch.cuda.set_device(device)
    for shape in GPU_SHAPES:
        x = torch.full(shape, float(rank), dtype=torch.bfloat16, device=device)
        if not bool((group.all_reduce(x.clone()) == sum(range(size))).all()):
            raise SystemExit(f"the sum of {shape} is wrong")
        zeros = torch.zeros_like(x)  # zeros, whose sums stay finite
        calls = partial(_repeat, partial(group.all_reduce, zeros))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            calls()
        ways: dict[str, Callable[[], object]] = {"nccl": calls, "nccl, in a graph": graph.replay}
        if rank == 0:
            there = torch.empty_like(x, device=torch.device("cuda", 1))
            ways["a copy"] = partial(_repeat, partial(there.copy_, x))
        for what, work in ways.items():
            times = _times(work, 5, partial(torch.cuda.synchronize, device))
            rows.append(_row(what, x, [each / GPU_CALLS for each in times]))
    return rows


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(GPU_CALLS):
        call()


def _times(
    work: Callable[[], object], runs: int, finish: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the seconds of each run, until `finish` returns."""
    times = []
    for _ in range(runs):
        finish()
        began = time.perf_counter()
        work()
        finish()
        times.append(time.perf_counter() - began)
    return times


def _row(collective: str, x: Tensor, times: Sequence[float]) -> dict[str, Any]:
    figures = {"min_us": float(np.min(times)) * 1e6, "p50_us": float(np.median(times)) * 1e6}
    return {"collective": collective, "shape": list(x.shape), "kib": x.nbytes / 1024, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=2000, help="of each tensor on a CPU (2000)")
    parser.add_argument("--gpu", action="store_true", help="between GPUs, one for each rank")
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        kind, rank, size, store, calls, descriptor = arguments.rank
        run_rank(kind, int(rank), int(size), Path(store), int(calls), int(descriptor))
        return
    if arguments.gpu and torch.cuda.device_count() < arguments.ranks:
        raise SystemExit(f"{arguments.ranks} ranks need as many CUDA devices")
    kinds = ("nccl",) if arguments.gpu else ("shm", "gloo")
    rows = [row for kind in kinds for row in measure(kind, arguments.ranks, arguments.calls)]
    record.show(rows)
    record.emit("collectives", {"ranks": arguments.ranks, "calls": arguments.calls}, rows)


if __name__ == "__main__":
    main()
