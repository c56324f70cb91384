"""Measure the time of an all-reduce between ranks on one CPU host, in shared memory and by gloo.

    python -m tools.bench.collectives [--ranks 2] [--calls 2000]

Each rank is a process with one thread. The figures are the minimum and the median of one rank's
calls with tensors of float32 [16, n].
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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.ranks.group import Group
from engine.ranks.meeting import LoopbackMeeting
from engine.ranks.shm import SharedMemoryGroup, memory_bytes
from engine.ranks.torch_group import TorchGroup
from tools.bench.support import record

ROWS, COLUMNS = 16, (128, 1024, 4096)
KINDS = ("shm", "gloo")
WARM_UP = 100
TIMEOUT_S = 60.0


def measure(kind: str, size: int, calls: int) -> list[dict[str, Any]]:
    """Start the ranks. Return rank 0's figures."""
    memory = os.memfd_create("ranks")
    os.truncate(memory, memory_bytes(size))
    with contextlib.ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        programs, sockets = [], []
        for rank in range(size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            place = [kind, str(rank), str(size), str(store), str(calls), str(theirs.fileno())]
            command = [sys.executable, "-m", "tools.bench.collectives", "--rank", *place]
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            with theirs:
                program = subprocess.Popen(command, stdout=pipe, pass_fds=[theirs.fileno()])
            programs.append(stack.enter_context(program))
            sockets.append(stack.enter_context(ours))
        pidfds = [os.pidfd_open(program.pid) for program in programs]
        for rank, ours in enumerate(sockets):
            others = [pidfd for other, pidfd in enumerate(pidfds) if other != rank]
            socket.send_fds(ours, [b"descriptors"], [memory, *others])
        for file in (memory, *pidfds):
            os.close(file)
        output, _ = programs[0].communicate()
        rows: list[dict[str, Any]] = json.loads(output)
    return [{"collective": kind, "ranks": size, **row} for row in rows]


def run_rank(kind: str, rank: int, size: int, store: str, calls: int, descriptor: int) -> None:
    """Execute the calls of one rank, and print its figures."""
    torch.set_num_threads(1)
    with socket.socket(fileno=descriptor) as parent:
        _, files, _, _ = socket.recv_fds(parent, 64, 16)
    group: Group
    if kind == "gloo":
        meeting = LoopbackMeeting(Path(store).parent)
        group = TorchGroup("gloo", rank, size, meeting, Path(store).name, TIMEOUT_S)
    else:
        memory, *pidfds = files
        others = dict(zip((each for each in range(size) if each != rank), pidfds, strict=True))
        group = SharedMemoryGroup(rank, range(size), memory, others, TIMEOUT_S)
    rows = []
    with torch.inference_mode():
        for columns in COLUMNS:
            x = torch.ones(ROWS, columns)
            times = []
            for _ in range(WARM_UP + calls):
                began = time.perf_counter()
                group.all_reduce(x)
                times.append(time.perf_counter() - began)
            low, middle = np.min(times[WARM_UP:]), np.median(times[WARM_UP:])
            figures = {"min_us": round(low * 1e6, 1), "p50_us": round(middle * 1e6, 1)}
            rows.append({"columns": columns, **figures})
    print(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        kind, rank, size, store, calls, descriptor = arguments.rank
        run_rank(kind, int(rank), int(size), store, int(calls), int(descriptor))
        return
    rows = [row for kind in KINDS for row in measure(kind, arguments.ranks, arguments.calls)]
    columns = {
        "all-reduce": "{collective}",
        "ranks": "{ranks}",
        "n": "{columns}",
        "min us": "{min_us:.0f}",
        "p50 us": "{p50_us:.0f}",
    }
    record.table(rows, columns)
    record.emit("collectives", {"rows": ROWS, "calls": arguments.calls}, rows)


if __name__ == "__main__":
    main()
