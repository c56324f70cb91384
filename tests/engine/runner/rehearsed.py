"""Kernels that traffic would compile although the warmup has ended. Needs no GPU and no
interpreter.

    python -m tests.engine.runner.rehearsed CHECKPOINT DTYPE GRAPHS SEED

prints an object: the number of kernels of the warmup, the number that traffic launched, and those
of them that the warmup lacks. It runs in its own process, because it records kernels as Triton
would specialise them.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from engine.batch import forward
from engine.batch.upload import HostColumn, packed_bytes, upload
from engine.build import prepare
from engine.models import load
from engine.models.linear import onednn
from kernels.sampling import verify
from kvtransfer.backends.base import PageCut, PagePool
from kvtransfer.backends.tcp.staging import StagedMemory
from kvtransfer.backends.tcp.wire import FrameKind
from tests.engine.runner.traffic import Traffic
from tests.support.engine.steps import Steps
from tests.support.hardware.device_twin import DeviceTwin
from tools.bench.resources.compilation import KernelLaunch, recorded

ARCH = 90
NUM_SLOTS = 9
CHUNK_TOKENS = 64
NUM_STEPS = 150
launch_verification = verify.verify_drafts_triton


class Silent:
    """A graph whose replay launches no kernel."""

    def replay(self) -> None:
        pass


def record(work: Callable[[], Tensor], *, apart: bool = False) -> tuple[Silent, Tensor]:
    return Silent(), work()


def packed(
    columns: Sequence[HostColumn], device: torch.device, into: Tensor | None = None
) -> object:
    """Upload as for a GPU: tensors are where packing puts them, not where the host has them."""
    if into is None:
        into = torch.empty(packed_bytes(columns), dtype=torch.uint8)
    return upload(columns, device, into)


def recorded_verification(rows: verify.DraftRows, *tensors: Tensor) -> None:
    """Launch the kernel, which computes nothing here, and compute by its reference."""
    launch_verification(rows, *tensors)
    verify.verify_drafts_reference(rows, *tensors)


def copy_pages(memory: StagedMemory, page_bytes: int) -> None:
    """Copy pages as for a peer that reads them, and as from a peer."""
    rng = np.random.default_rng(0)
    whole = PageCut(0, page_bytes)
    departures, arrivals = memory.departures(), memory.arrivals()
    for count in (1, 2, 3, 16, 33):
        pages = rng.permutation(40)[:count].astype(np.int32)
        departures.begin(FrameKind.POOL, pages, whole)(bytearray(8))
        arrivals.vectors(pages, bytearray(8), FrameKind.POOL, whole)
        arrivals.landed(pages, FrameKind.POOL, whole)
        arrivals.settle()
    departures.close()


def main(checkpoint: str, dtype: str, graphs: str, seed: str) -> None:
    with mock.patch.object(onednn, "packs_bfloat16", return_value=False):  # matrices as on a GPU
        model = load(Path(checkpoint), torch.device("cpu"), getattr(torch, dtype))
    launches: dict[KernelLaunch, None]
    with (
        recorded(ARCH) as launches,
        mock.patch.object(forward, "upload", packed),
        mock.patch.object(verify, "verify_drafts_triton", recorded_verification),
    ):
        steps = Steps(model, num_slots=NUM_SLOTS, recorder=record if graphs == "graphs" else None)
        prepare(steps.runner, CHUNK_TOKENS + NUM_SLOTS)
        kv = steps.pool
        pool = PagePool(kv.base_address, kv.page_bytes, kv.num_pages, "cpu")
        memory = StagedMemory(pool, DeviceTwin())
        rehearsed = set(launches)
        launches.clear()
        traffic = Traffic(steps, int(seed), vocabulary_size=model.spec.vocabulary_size, drafts=True)
        for _ in range(NUM_STEPS):
            traffic.step()
        steps.settle()
        copy_pages(memory, pool.page_bytes)
        steps.close()
    missing = [dataclasses.asdict(launch) for launch in launches if launch not in rehearsed]
    for launch in missing:
        del launch["specialisation"]
    print(json.dumps({"rehearsed": len(rehearsed), "launched": len(launches), "missing": missing}))


if __name__ == "__main__":
    main(*sys.argv[1:])
