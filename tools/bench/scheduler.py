"""Measure the CPU time of one decode step on the engine thread, with a device that takes no time.

    python -m tools.bench.scheduler [--steps 400]

A step consists of a poll of an empty inbox, next_batch, the forward's tensors, and finish. The
figures are thread CPU time, so that other processes on the machine hardly count: the median over
the steps, and its growth per request. Random sampling needs more columns of tensors than greedy.
The bench also measures the tensors alone for steps with much context, their packing for the single
copy to the device, and their encoding for another rank.

For comparison: vLLM 0.33's scheduler alone (schedule and update_from_output) needs 79 us at 1
request, 1850 us at 64, 6600 us at 256, and 39000 us at 1024 requests on such a machine.
"""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from common.config import EngineConfig, SchedulerConfig
from common.page_tables import PageTables
from common.request import RequestSpec
from common.requests.sampling import SamplingParams
from engine.adapters.adapters import no_adapters
from engine.batch.batch import BatchResult, ForwardMode, ScheduleBatch
from engine.batch.forward import BatchBuilder
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.batch.upload import packed_bytes, upload
from engine.core import CoreShape, EngineCore
from engine.loop.loop import EventLoop
from engine.runner.launch_message import encode
from engine.runner.runner import StepBuilder
from engine.runner.step import Step
from engine.sampling.composition import every_feature
from engine.scheduler.scheduler import Scheduler
from tools.bench.support import record

BATCH_SIZES = (1, 64, 256, 1024)
GOAL_US = {1: 60, 64: 180, 256: 400, 1024: 1500}
STRETCH_US = {1: 40, 64: 80, 256: 150, 1024: 400}
PAGE_SIZE = 16
PROMPT_TOKENS = 128
VOCABULARY = 32000
EOS = 2
WARM_UP = 50
CONTEXTS = {
    "256 x 1k": [1000] * 256,
    "256 x 1k + 131k": [1000] * 256 + [131_000],
    "128 x 1k + 128 x 4k": [1000, 4000] * 128,
}


@dataclass(frozen=True, eq=False)
class _NullLaunched:
    """A launched forward pass that completes immediately and always returns the same token."""

    batch: ScheduleBatch

    def sample(self) -> None:
        pass

    def result(self) -> BatchResult:
        return BatchResult(np.full(len(self.batch.slots), 7, np.int32))


@dataclass(eq=False)
class _NullRunner:
    """A runner that builds steps and discards them."""

    builder: StepBuilder
    building_s: float = 0.0

    def launch(self, batch: ScheduleBatch) -> _NullLaunched:
        began = time.thread_time()
        self.builder.build(batch)
        self.building_s = time.thread_time() - began
        return _NullLaunched(batch)


@dataclass(eq=False)
class _BenchRole:
    """An engine role that only schedules."""

    scheduler: Scheduler
    num_tokens: int = 0
    inbox: list[Request] = field(default_factory=list)

    def poll(self) -> None:
        while self.inbox:
            self.scheduler.add(self.inbox.pop())
        self.scheduler.expire()

    def next_batch(self) -> ScheduleBatch | None:
        return self.scheduler.next_batch()

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        self.num_tokens += len(self.scheduler.finish(batch, result).tokens)

    def idle(self) -> None:
        raise AssertionError("there is work")


def measure(batch_size: int, steps: int, *, greedy: bool) -> dict[str, Any]:
    """Return microseconds of thread CPU time per decode step of `batch_size` requests."""
    length = PROMPT_TOKENS + steps + WARM_UP + 10
    num_pages = batch_size * (-(-length // PAGE_SIZE) + 1)
    config = SchedulerConfig(  # decoding starts after all prompts are computed
        max_running_requests=batch_size, max_queued_requests=batch_size, mixed_chunk=False
    )
    tables = PageTables(PAGE_SIZE)
    core = EngineCore.make(
        EngineConfig(model="none", scheduler=config),
        CoreShape(tables, length, num_pages),
        RequestLimits(length, VOCABULARY, tables, num_pages, eos_token_ids=(EOS,)),
    )
    scheduler = Scheduler(config, core, lambda request, pages: None)
    features = every_feature(core.table, VOCABULARY, (EOS,), torch.device("meta"))
    builder = StepBuilder(core.table, features, no_adapters(core.table))
    role, runner = _BenchRole(scheduler), _NullRunner(builder)
    rng = np.random.default_rng(0)
    for key in range(batch_size):
        # Different lengths, so that the usual number of requests needs a page in each step.
        num_tokens = PROMPT_TOKENS - key % PAGE_SIZE
        role.inbox.append(
            Request.of(
                RequestSpec(
                    token_ids=rng.integers(3, VOCABULARY, num_tokens, dtype=np.int32).tobytes(),
                    sampling=SamplingParams(
                        max_tokens=length, seed=key, temperature=0.0 if greedy else 1.0
                    ),
                ),
                key=key,
                deadline=time.monotonic() + 3600,
                arrived=0.0,
                origin=(1, key),
            )
        )
    loop = EventLoop(role, runner)
    in_flight = None
    while len(in_flight.batch.slots if in_flight else ()) < batch_size or (
        scheduler.queues()["waiting"] or in_flight is None
    ):
        in_flight = loop.step(in_flight)
    for _ in range(WARM_UP):
        in_flight = loop.step(in_flight)
    durations, building = [], []
    before = role.num_tokens
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        began = time.thread_time()
        in_flight = loop.step(in_flight)
        durations.append(time.thread_time() - began)
        building.append(runner.building_s)
    gc.unfreeze()
    if role.num_tokens - before != batch_size * steps:
        raise RuntimeError(f"{role.num_tokens - before} tokens in {steps} steps of {batch_size}")
    return {
        "sampling": "greedy" if greedy else "random",
        "batch": batch_size,
        "step_us": round(statistics.median(durations) * 1e6, 1),
        "p90_us": round(statistics.quantiles(durations, n=10)[-1] * 1e6, 1),
        "tensors_us": round(statistics.median(building) * 1e6, 1),
        "goal_us": GOAL_US[batch_size],
        "stretch_us": STRETCH_US[batch_size],
    }


def measure_tensors(name: str, steps: int) -> dict[str, Any]:
    """Return microseconds of CPU time for the tensors of a decode step."""
    ends = np.array(CONTEXTS[name], np.int32)
    table = SlotTable(len(ends), int(ends.max()), PAGE_SIZE)
    pages = np.arange(table.page_table.size, dtype=np.int32)
    table.page_table[:] = pages.reshape(table.page_table.shape)
    table.known[:] = ends
    builder = BatchBuilder(table)
    slots = np.arange(len(ends), dtype=np.int32)
    batch = ScheduleBatch(
        step=1,
        mode=ForwardMode.DECODE,
        slots=slots,
        starts=ends - 1,
        ends=ends,
        samples=np.ones(len(ends), np.bool_),
    )
    num_bytes = packed_bytes(builder.build(batch).columns())
    into = torch.empty(num_bytes, dtype=torch.uint8)
    building, packing, encoding = [], [], []
    for _ in range(steps):
        began = time.thread_time()
        inputs = builder.build(batch)
        built = time.thread_time()
        upload(inputs.columns(), into.device, into)
        packed = time.thread_time()
        msgspec.msgpack.encode(encode(Step(inputs), into.numpy()))
        encoding.append(time.thread_time() - packed)
        packing.append(packed - built)
        building.append(built - began)
    return {
        "contexts": name,
        "tensors_us": round(statistics.median(building) * 1e6, 1),
        "packing_us": round(statistics.median(packing) * 1e6, 1),
        "encoding_us": round(statistics.median(encoding) * 1e6, 1),
        "least_encoding_us": round(min(encoding) * 1e6, 1),
        "bytes": num_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    rows = [
        measure(batch_size, steps, greedy=greedy)
        for greedy in (True, False)
        for batch_size in BATCH_SIZES
    ]
    columns = {
        "sampling": "{sampling}",
        "batch": "{batch}",
        "us/step": "{step_us:.0f}",
        "p90": "{p90_us:.0f}",
        "of it tensors": "{tensors_us:.0f}",
        "goal": "{goal_us}",
        "stretch": "{stretch_us}",
    }
    record.table(rows, columns)
    first, last = rows[0], rows[len(BATCH_SIZES) - 1]
    growth = (last["step_us"] - first["step_us"]) / (last["batch"] - first["batch"])
    record.say(f"growth, greedy: {growth:.2f} us per request")
    contexts = [measure_tensors(name, steps) for name in CONTEXTS]
    columns = {
        "contexts": "{contexts}",
        "us of tensors": "{tensors_us:.0f}",
        "of packing": "{packing_us:.0f}",
        "of encoding": "{encoding_us:.0f}",
        "least": "{least_encoding_us:.0f}",
        "bytes to the device": "{bytes}",
    }
    record.table(contexts, columns)
    config = {"steps": steps, "page_size": PAGE_SIZE, "prompt_tokens": PROMPT_TOKENS}
    record.emit(
        "scheduler", config, rows, contexts=contexts, growth_us_per_request=round(growth, 3)
    )


if __name__ == "__main__":
    main()
