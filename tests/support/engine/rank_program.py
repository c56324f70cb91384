"""One rank of a test of collectives, as a separate process.

`python -m tests.support.engine.rank_program SCENARIO` receives its place as JSON, and its
descriptors, over the socket that is its stdin. It prints the scenario's result as JSON.
"""

import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import EngineFault
from engine.ranks.group import Group
from engine.ranks.meeting import LoopbackMeeting
from engine.ranks.shm import BUFFER_BYTES, SharedMemoryGroup
from engine.ranks.torch_group import TorchGroup

NUM_CALLS = 150
SHAPES = ((1,), (3, 5), (16, 128), (1, 7, 2), (16, 1024))
DTYPES = (torch.float32, torch.bfloat16, torch.int32)


def group_of(place: dict[str, Any], files: list[int]) -> Group:
    rank, size, timeout_s = place["rank"], place["size"], place["timeout_s"]
    if place["kind"] in ("gloo", "nccl"):
        store = Path(place["store"])
        return TorchGroup(
            place["kind"], rank, size, LoopbackMeeting(store.parent), store.name, timeout_s
        )
    memory, *pidfds = files
    others = dict(zip((each for each in range(size) if each != rank), pidfds, strict=True))
    return SharedMemoryGroup(rank, range(size), memory, others, timeout_s)


def inputs(size: int, number: int, kind: str) -> list[Tensor]:
    """Return the tensors of all ranks for one call, the same on every rank."""
    rng = random.Random(number)
    dtypes = DTYPES[:1] if kind == "gloo" else DTYPES
    shape, dtype = rng.choice(SHAPES), rng.choice(dtypes)
    if number == NUM_CALLS // 2:  # several pieces, the last one shorter
        shape, dtype = (3, BUFFER_BYTES // 4 + 5), torch.float32
    generator = torch.Generator().manual_seed(number)
    return [(torch.randn(shape, generator=generator) * 100).to(dtype) for _ in range(size)]


def summed(parts: list[Tensor]) -> Tensor:
    wide = [part.float() if part.dtype == torch.bfloat16 else part for part in parts]
    total = wide[0].clone()
    for part in wide[1:]:
        total += part
    return total.to(parts[0].dtype)


def calls(group: Group, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the result and the expected result of random calls, some after a pause."""
    pauses = random.Random(1000 + group.rank)
    for number in range(NUM_CALLS):
        if pauses.random() < 0.05:
            time.sleep(pauses.random() * 0.003)
        parts = inputs(group.size, number, kind)
        mine = parts[group.rank].clone()  # a copy, because it may be overwritten
        if kind == "nccl":
            mine = mine.to(f"cuda:{group.rank}")
        match number % 3:
            case 0:
                yield group.all_reduce(mine), summed(parts)
            case 1:
                yield group.all_gather(mine), torch.cat(parts, dim=-1)
            case _:
                yield group.broadcast(mine), parts[0]


def compare(group: Group, kind: str) -> str:
    """Make random calls. Return a hash of all results."""
    digest = hashlib.sha256()
    for made, expected in calls(group, kind):
        result = made.cpu()
        if kind == "shm":
            assert torch.equal(result, expected)
        else:  # this kind adds in its own order
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        digest.update(result.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def lose(group: Group, kind: str, signal_number: int) -> str:
    """Call until the last rank gets a signal. Return the error of the other ranks."""
    x = torch.ones(16, 128)
    for number in range(1000):
        if number == 100 and group.rank == group.size - 1:
            os.kill(os.getpid(), signal_number)
        try:
            group.all_reduce(x)
        except EngineFault as fault:
            return str(fault)
    return "no error"


SCENARIOS: dict[str, Callable[[Group, str], str]] = {
    "compare": compare,
    "killed": lambda group, kind: lose(group, kind, signal.SIGKILL),
    "frozen": lambda group, kind: lose(group, kind, signal.SIGSTOP),
}


def main(scenario: str) -> None:
    torch.set_num_threads(1)
    with socket.socket(fileno=0) as parent:
        text, files, _, _ = socket.recv_fds(parent, 4096, 16)
    place = json.loads(text)
    group = group_of(place, files)
    print(json.dumps(SCENARIOS[scenario](group, place["kind"])), flush=True)
    group.close()


if __name__ == "__main__":
    main(sys.argv[1])
