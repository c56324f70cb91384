"""Part decode: whole steps, from the scheduler's decision to the token, against the roofline.

The roofline of a step is the time to read every weight and all KV of the batch once at the read
bandwidth. All modes of a step must give the same tokens.
"""

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.models import Model
from kernels import early_launch
from tools.bench.gpu.model import proof
from tools.bench.gpu.model.engine import PAGE_SIZE, DecodeEngine, StepMode, make_pool
from tools.bench.gpu.model.models import SERVED, random_model
from tools.bench.gpu.process import Row, guarded, note
from tools.bench.gpu.setting import Floor, Setting, Work

MODELS = ("Llama-3-8B", "Qwen3-8B", "Qwen3-0.6B")
CASES = ((64, 1024), (1, 1024), (16, 1024), (256, 1024), (64, 8192), (16, 8192), (1, 8192))
DRY_CASES = ((1, 40), (3, 40))
BEST = StepMode(graphs=True, overlap=True)
MODES = (
    BEST,
    StepMode(graphs=True, overlap=True, early=True),
    StepMode(graphs=True, overlap=False),
    StepMode(graphs=False, overlap=True),
    StepMode(graphs=False, overlap=False),
)
LONG = 8192  # context tokens from which only the best mode is measured
SPARE_BYTES = 5 << 30  # device memory beside weights and pages
WARM_UP = 8
PROFILED = 10  # steps of a timeline
LONGEST_GAP_US = 5.0  # between two kernels of one graph. Longer gaps count as idle
TOP = 12  # kernels that are shown
NAME_LENGTH = 70


class Case(NamedTuple):
    """Steps of a batch. floor: bytes of the weights, and of the KV in the middle step."""

    name: str
    model: Model
    pool: KVPool
    batch: int
    context: int
    steps: int
    floor: Floor

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}, context {self.context}"

    @property
    def labels(self) -> dict[str, Any]:
        return {"model": self.name, "batch": self.batch, "context": self.context}


def compile_calls(setting: Setting) -> Iterator[Work]:
    """Yield calls that need the same kernels as whole forward passes of any part."""
    for name in setting.sized((*MODELS, SERVED), ("tiny",)):
        yield partial(proof.forwards_by_kernels, setting, name)


def measure(setting: Setting) -> Iterator[Row]:
    for name in setting.sized(MODELS, ("tiny",)):
        proved = proof.row(setting, name)
        yield proved
        if proved["right"]:
            yield from _model(setting, name)


def _model(setting: Setting, name: str) -> Iterator[Row]:
    model, weight_bytes = random_model(name, setting.device, setting.dtype)
    layout, steps = KVLayout.of(model.spec.layers, PAGE_SIZE, model.dtype), setting.sized(40, 3)
    spare = WARM_UP + steps + PROFILED  # tokens of a row in the measurement and the profile
    needed = {
        (batch, context): batch * -(-(context + 2 * spare) // PAGE_SIZE)
        for batch, context in setting.sized(CASES, DRY_CASES)
    }
    room = _free_bytes(setting) // layout.page_bytes
    pool = make_pool(model, max((pages for pages in needed.values() if pages <= room), default=1))
    for (batch, context), pages in needed.items():
        kv_bytes = batch * (context + steps // 2) * layout.token_bytes
        floor = Floor("read", weight_bytes + kv_bytes)
        case = Case(name, model, pool, batch, context, steps, floor)
        if pages <= room:
            yield from guarded(str(case), _case(setting, case))
        else:
            gib = pages * layout.page_bytes / 2**30
            yield note(str(case), f"{gib:.0f} GiB of KV do not fit beside the weights")


def _case(setting: Setting, case: Case) -> Iterator[Row]:
    """Measure all modes. A mode whose tokens differ from those of the best one is not timed."""
    expected: NDArray[np.int32] | None = None
    for mode in (BEST,) if case.context >= LONG else MODES:
        with mock.patch.object(early_launch, "ENABLED", mode.early):
            engine = DecodeEngine(setting, case.model, case.pool, case.batch, case.context, mode)
            try:
                row = _steps(setting, engine, case, mode)
                tokens = engine.tokens()[: WARM_UP + case.steps - 1]
                expected = tokens if expected is None else expected
                if np.array_equal(tokens, expected):
                    yield row
                else:
                    equal = float((tokens == expected).mean())
                    yield note(f"{case}, {mode}", f"only {equal:.1%} of its tokens are the best's")
                shown = mode.graphs and not mode.early and case.batch in (1, 64)
                if shown and case.context < LONG:
                    labels = case.labels | {"overlap": mode.overlap}
                    yield from _timeline(setting, engine, labels)
            finally:
                engine.close()


def _steps(setting: Setting, engine: DecodeEngine, case: Case, mode: StepMode) -> Row:
    engine.run(WARM_UP)
    setting.finish()
    gc.collect()
    gc.freeze()
    engine.times.forget()
    began = time.perf_counter()
    engine.run(case.steps)
    wall_s = time.perf_counter() - began
    launch_s, wait_s = engine.times.launch_s, engine.times.wait_s
    gc.unfreeze()
    setting.finish()
    step_s = wall_s / case.steps
    return {
        "table": "steps",
        **case.labels,
        **mode._asdict(),
        "ms": step_s * 1e3,
        "roofline_ms": case.floor.amount / setting.ceilings["read"] * 1e3,
        "share": setting.share(case.floor, step_s),
        "tokens_per_s": case.batch / step_s,
        "idle": engine.times.idle_share(),
        "scheduling_us": (wall_s - launch_s - wait_s) / case.steps * 1e6,
        "launching_us": launch_s / case.steps * 1e6,
        "waiting_us": wait_s / case.steps * 1e6,
    }


def _timeline(setting: Setting, engine: DecodeEngine, labels: dict[str, Any]) -> Iterator[Row]:
    """Yield one row for all steps, then the kernels with the longest time, from torch's profiler.

    Unlike events around steps, it separates time without a kernel from time within one. A profiled
    step is slightly slower, so only the shares are meaningful.

    Args:
        labels: fields of every row. One is `overlap`.
    """
    setting.finish()
    activity = ProfilerActivity.CPU if setting.dry else ProfilerActivity.CUDA
    where = DeviceType.CPU if setting.dry else DeviceType.CUDA
    with profile(activities=[activity]) as profiler:
        engine.run(PROFILED)
        setting.finish()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == where
    )
    if not events:
        raise RuntimeError("the profiler saw nothing")
    whole = max(end for _, end, _ in events) - events[0][0]
    busy, idle, until = 0.0, 0.0, events[0][0]
    for start, end, _ in events:
        gap = start - until
        idle += gap if gap > LONGEST_GAP_US else 0.0
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    yield {
        "table": "timeline",
        **labels,
        "us": whole / PROFILED,
        "in_kernels": busy / whole,
        "idle": idle / whole,
        "kernels": len(events) / PROFILED,
    }
    if not labels["overlap"]:  # otherwise the kernels are the same, only further apart
        return
    spent: dict[str, list[float]] = defaultdict(list)
    for start, end, name in events:
        spent[name].append(end - start)
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:TOP]:
        yield {
            "table": "where a step goes",
            **labels,
            "kernel": name if len(name) <= NAME_LENGTH else name[:NAME_LENGTH] + "...",
            "times": len(times) / PROFILED,
            "us": sum(times) / PROFILED,
            "share": sum(times) / whole,
        }


def _free_bytes(setting: Setting) -> int:
    if setting.dry:
        return 64 << 20
    torch.cuda.empty_cache()
    return max(0, torch.cuda.mem_get_info(setting.device)[0] - SPARE_BYTES)
