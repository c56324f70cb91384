"""Part decode: whole steps, from the scheduler's decision to the token, against the roofline.

The roofline of a step is the time to read every weight and all KV of the batch once at the read
bandwidth. All modes of a step must give the same tokens.
"""

import gc
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.models import Model
from kernels import early_launch
from tools.bench.gpu.frame import Row, Tables, guarded, note
from tools.bench.gpu.model import proof, timeline
from tools.bench.gpu.model.engine import PAGE_SIZE, DecodeEngine, Way, make_pool
from tools.bench.gpu.model.models import SERVED, random_model
from tools.bench.gpu.setting import Setting

TABLES: Tables = {
    "steps": {
        "model": "{model}",
        "batch": "{batch}",
        "context": "{context}",
        "graphs": "{graphs}",
        "overlap": "{overlap}",
        "early launch": "{early}",
        "ms a step": "{ms:.3f}",
        "roofline ms": "{roofline_ms:.3f}",
        "share": "{share:.0%}",
        "tokens/s": "{tokens_per_s:.0f}",
        "GPU idle": "{idle:.1%}",
        "host us: scheduling": "{scheduling_us:.0f}",
        "launching": "{launching_us:.0f}",
        "waiting": "{waiting_us:.0f}",
    },
    **timeline.TABLES,
    **proof.TABLES,
}

MODELS = ("Llama-3-8B", "Qwen3-8B", "Qwen3-0.6B")
CASES = ((64, 1024), (1, 1024), (16, 1024), (256, 1024), (64, 8192), (16, 8192), (1, 8192))
DRY_CASES = ((1, 40), (3, 40))
WAYS = (
    Way(True, True),
    Way(True, True, early=True),
    Way(True, False),
    Way(False, True),
    Way(False, False),
)
LONG = 8192  # context tokens from which only the best mode is measured
SPARE_BYTES = 5 << 30  # device memory beside weights and pages
WARM_UP = 8


def compile_calls(setting: Setting) -> Iterator[Callable[[], object]]:
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
    layout = KVLayout.of(model.spec.layers, PAGE_SIZE, model.dtype)
    steps = setting.sized(40, 3)
    needed = {case: _pages(*case, steps) for case in setting.sized(CASES, DRY_CASES)}
    room = _free_bytes(setting) // layout.page_bytes
    fitting = {case: pages for case, pages in needed.items() if pages <= room}
    pool = make_pool(model, max(fitting.values(), default=1))
    for case, pages in needed.items():
        batch, context = case
        if case not in fitting:
            gib = pages * layout.page_bytes / 2**30
            what = f"{name}, batch {batch}, context {context}"
            yield note(what, f"{gib:.0f} GiB of KV do not fit beside the weights")
            continue
        step_bytes = weight_bytes + batch * (context + steps // 2) * layout.token_bytes
        labels = {"model": name, "batch": batch, "context": context}
        rows = _case(setting, model, pool, labels, step_bytes, steps)
        yield from guarded(f"{name}, batch {batch}, context {context}", rows)


def _case(
    setting: Setting,
    model: Model,
    pool: KVPool,
    labels: dict[str, Any],
    step_bytes: int,
    steps: int,
) -> Iterator[Row]:
    expected: NDArray[np.int32] | None = None
    for way in WAYS[:1] if labels["context"] >= LONG else WAYS:
        with mock.patch.object(early_launch, "ENABLED", way.early):
            tokens = yield from _way(setting, model, pool, labels, way, expected, step_bytes, steps)
        expected = tokens if expected is None else expected


def _way(
    setting: Setting,
    model: Model,
    pool: KVPool,
    labels: dict[str, Any],
    way: Way,
    expected: NDArray[np.int32] | None,
    step_bytes: int,
    steps: int,
) -> Generator[Row, None, NDArray[np.int32]]:
    """Measure one mode and return the tokens of its first steps.

    A mode with tokens other than `expected` is not timed.
    """
    engine = DecodeEngine(setting, model, pool, labels["batch"], labels["context"], way)
    try:
        row, tokens = _steps(setting, engine, labels, way, step_bytes, steps)
        if expected is None or np.array_equal(tokens, expected):
            yield row
        else:
            equal = float((tokens == expected).mean())
            what = f"{labels['model']}, batch {labels['batch']}, {way}"
            yield note(what, f"only {equal:.1%} of its tokens are those of {WAYS[0]}")
        shown = way.graphs and not way.early and labels["batch"] in (1, 64)
        if shown and labels["context"] < LONG:
            yield from timeline.measure(setting, engine, labels | {"overlap": way.overlap})
    finally:
        engine.close()
    return tokens


def _steps(
    setting: Setting,
    engine: DecodeEngine,
    labels: dict[str, Any],
    way: Way,
    step_bytes: int,
    steps: int,
) -> tuple[Row, NDArray[np.int32]]:
    """Return the row, and the tokens of the first steps."""
    engine.run(WARM_UP)
    setting.finish()
    gc.collect()
    gc.freeze()
    engine.forget()
    began = time.perf_counter()
    engine.run(steps)
    wall_s = time.perf_counter() - began
    spent = engine.spent
    gc.unfreeze()
    setting.finish()
    step_s = wall_s / steps
    row = {
        "table": "steps",
        **labels,
        "graphs": way.graphs,
        "overlap": way.overlap,
        "early": way.early,
        "ms": step_s * 1e3,
        "roofline_ms": step_bytes / setting.ceilings.read * 1e3,
        "share": setting.share("read", step_bytes, step_s),
        "tokens_per_s": labels["batch"] / step_s,
        "idle": engine.idle_share(),
        "scheduling_us": (wall_s - spent.launch - spent.wait) / steps * 1e6,
        "launching_us": spent.launch / steps * 1e6,
        "waiting_us": spent.wait / steps * 1e6,
    }
    return row, engine.tokens()[: WARM_UP + steps - 1]


def _pages(batch: int, context: int, steps: int) -> int:
    """Return the number of pages for a measurement and a profile."""
    return batch * -(-(context + 2 * (WARM_UP + steps + timeline.STEPS)) // PAGE_SIZE)


def _free_bytes(setting: Setting) -> int:
    if setting.dry:
        return 64 << 20
    torch.cuda.empty_cache()
    return max(0, torch.cuda.mem_get_info(setting.device)[0] - SPARE_BYTES)
