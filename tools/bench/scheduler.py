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

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from bench.steps import SchedulingRole, random_request
from common.config import EngineConfig, SchedulerConfig
from common.page_tables import PageTables
from engine.adapters.adapters import no_adapters
from engine.batch.batch import BatchResult, ForwardMode, LaunchedBatch, ScheduleBatch
from engine.batch.forward import BatchBuilder
from engine.batch.limits import RequestLimits
from engine.batch.table import SlotTable
from engine.batch.upload import packed_bytes, upload
from engine.core import CoreShape, EngineCore
from engine.loop.loop import EventLoop
from engine.runner.launch_message import encode
from engine.runner.runner import StepBuilder
from engine.runner.step import Step
from engine.sampling.composition import every_feature
from engine.scheduler.results import StepOutcome
from engine.scheduler.scheduler import Scheduler
from tools.bench.support.record import emit, parsed, say, show

GOAL_US = {1: 60, 64: 180, 256: 400, 1024: 1500}  # by batch size
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


class _CountingRole(SchedulingRole):
    num_tokens = 0

    def finished(self, batch: ScheduleBatch, outcome: StepOutcome) -> None:
        self.num_tokens += len(outcome.tokens)


def measure(batch_size: int, steps: int, *, greedy: bool) -> dict[str, Any]:
    """Return microseconds of thread CPU time per decode step of `batch_size` requests."""
    length = PROMPT_TOKENS + steps + WARM_UP + 10
    role, runner = _node(batch_size, length)
    rng, temperature = np.random.default_rng(0), 0.0 if greedy else 1.0
    for key in range(batch_size):
        # Different lengths, so that the usual number of requests needs a page in each step.
        tokens = PROMPT_TOKENS - key % PAGE_SIZE
        role.scheduler.add(random_request(key, rng, tokens, VOCABULARY, length, temperature))
    loop = EventLoop(role, runner)
    in_flight: LaunchedBatch | None = None
    while in_flight is None or len(in_flight.batch.slots) < batch_size:
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
        "step_us": _median_us(durations),
        "p90_us": round(statistics.quantiles(durations, n=10)[-1] * 1e6, 1),
        "tensors_us": _median_us(building),
        "goal_us": GOAL_US[batch_size],
        "stretch_us": STRETCH_US[batch_size],
    }


def _node(batch_size: int, length: int) -> tuple[_CountingRole, _NullRunner]:
    """Return a node for requests of `length` tokens that decodes when all prompts are computed."""
    num_pages = batch_size * (-(-length // PAGE_SIZE) + 1)
    config = SchedulerConfig(
        max_running_requests=batch_size, max_queued_requests=batch_size, mixed_chunk=False
    )
    tables = PageTables(PAGE_SIZE)
    core = EngineCore.make(
        EngineConfig(model="none", scheduler=config),
        CoreShape(tables, length, num_pages),
        RequestLimits(length, VOCABULARY, tables, num_pages, eos_token_ids=(EOS,)),
    )
    features = every_feature(core.table, VOCABULARY, (EOS,), torch.device("meta"))
    builder = StepBuilder(core.table, features, no_adapters(core.table))
    scheduler = Scheduler(config, core, lambda request, pages: None)
    return _CountingRole(scheduler), _NullRunner(builder)


def measure_tensors(name: str, steps: int) -> dict[str, Any]:
    """Return microseconds of CPU time for the tensors of a decode step."""
    ends = np.array(CONTEXTS[name], np.int32)
    slots = SlotTable(len(ends), int(ends.max()), PAGE_SIZE)
    pages = np.arange(slots.page_table.size, dtype=np.int32)
    slots.page_table[:] = pages.reshape(slots.page_table.shape)
    slots.known[:] = ends
    builder = BatchBuilder(slots)
    batch = ScheduleBatch(
        step=1,
        mode=ForwardMode.DECODE,
        slots=np.arange(len(ends), dtype=np.int32),
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
        "tensors_us": _median_us(building),
        "packing_us": _median_us(packing),
        "encoding_us": _median_us(encoding),
        "least_encoding_us": round(min(encoding) * 1e6, 1),
        "bytes": num_bytes,
    }


def _median_us(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def main() -> None:
    steps = parsed("scheduler", __doc__, ("--steps", 400, "steps of each kind")).steps
    rows = [measure(size, steps, greedy=greedy) for greedy in (True, False) for size in GOAL_US]
    show(rows)
    first, last = rows[0], rows[len(GOAL_US) - 1]
    growth = (last["step_us"] - first["step_us"]) / (last["batch"] - first["batch"])
    say(f"growth, greedy: {growth:.2f} us per request")
    contexts = [measure_tensors(name, steps) for name in CONTEXTS]
    show(contexts)
    config = {"steps": steps, "page_size": PAGE_SIZE, "prompt_tokens": PROMPT_TOKENS}
    emit("scheduler", config, rows, contexts=contexts, growth_us_per_request=round(growth, 3))


if __name__ == "__main__":
    main()
