"""Part bits: whether the bits of a row depend on the other rows of its step on this GPU.

Compares every operation of a step alone and beside others, attention in all kinds of step, and
whole models with the self-test of `engine.batch_invariant`. If no bit differs, it records the GPU,
so that nodes with that setting start on it. Otherwise it removes an earlier record.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from engine import batch_invariance
from engine.kv_cache.layout import KVLayout
from engine.models.probe import differing_operation
from kernels import device
from kernels.narrow import FIRST_ARCHITECTURE
from tools.bench.gpu.model.models import random_model
from tools.bench.gpu.operations import equal_queries, equal_rows
from tools.bench.gpu.operations.equal_queries import AttentionShape, KeysAndQueries
from tools.bench.gpu.process import NOTES, Row, guarded
from tools.bench.gpu.setting import Setting, Work

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAGE_SIZE = 16
SHAPES = {
    "32/8x128": AttentionShape(32, 8, 128),
    "14/2x64": AttentionShape(14, 2, 64),
    "8/4x256": AttentionShape(8, 4, 256),
    "32/8x128 in 8 bits": AttentionShape(32, 8, 128, kept_in=torch.float8_e4m3fn),
    "latents": AttentionShape(16, 1, 576, value_dim=512),
    "sharp scores": AttentionShape(32, 8, 128, sharpness=10.0),
}
DRY_SHAPES = {"2/1x24": AttentionShape()}


def compile_calls(setting: Setting) -> Iterator[Work]:
    """Yield calls that need the same kernels as `measure`, except those of the models."""
    for dtype in setting.sized(DTYPES, (torch.float32,)):
        for _, operation in equal_rows.operations(setting, dtype):
            for count in setting.sized((1, 65, max(equal_rows.COUNTS)), (1,)):
                yield partial(_call_once, partial(_first_rows, operation, count, setting.device))
        for name, shape in setting.sized(SHAPES, DRY_SHAPES).items():
            yield partial(_call_once, partial(list, _attention(setting, dtype, name, shape)))


def _first_rows(operation: equal_rows.Operation, count: int, where: torch.device) -> Tensor:
    return operation(torch.arange(count, device=where))


def _call_once(call: Callable[[], object]) -> None:
    device.use_batch_invariant(True)
    try:
        call()
    finally:
        device.use_batch_invariant(False)


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    device.use_batch_invariant(True)
    passed = True
    for row in _compared(setting):
        passed = passed and row["table"] != NOTES and not row["differing"]
        yield row
    gpu, path = "none: a rehearsal", "none"
    if not setting.dry:
        gpu = batch_invariance.gpu_arithmetic(setting.device)
        path = str(batch_invariance.record(setting.device, passed=passed))
    yield {"table": "verdict", "gpu": gpu, "passed": passed, "record": path}
    if not passed:
        raise ArithmeticError("bits depend on the batch, or were not compared")


def _compared(setting: Setting) -> Iterator[Row]:
    for dtype in setting.sized(DTYPES, (torch.float32,)):
        for name, operation in equal_rows.operations(setting, dtype):
            yield from guarded(name, _operation(setting, dtype, name, operation))
        for name, shape in setting.sized(SHAPES, DRY_SHAPES).items():
            yield from guarded(name, _attention(setting, dtype, name, shape))
    models = setting.sized(("Qwen3-0.6B", "Llama-3-8B"), ("tiny",))
    yield from chain.from_iterable(guarded(name, _model(setting, name)) for name in models)


def _operation(
    setting: Setting, dtype: torch.dtype, name: str, operation: equal_rows.Operation
) -> Iterator[Row]:
    counts = setting.sized(equal_rows.COUNTS, equal_rows.DRY_COUNTS)
    yield _row(name, dtype, "other rows", equal_rows.compare(operation, counts, setting.device))


def _attention(
    setting: Setting, dtype: torch.dtype, name: str, shape: AttentionShape
) -> Iterator[Row]:
    narrow = device.architecture() >= FIRST_ARCHITECTURE and dtype != torch.float32
    if shape.kept_in is not None and not narrow:
        return
    data = KeysAndQueries(setting.sized(2500, 70), shape, dtype, setting.device)
    compare = partial(equal_queries.compare, data, tokens=setting.sized(16, 4))
    for window in setting.sized((None, 700), (None, 20)):
        for seed, cap in enumerate((None, 30.0)):
            for way, found in compare(seed=seed, window=window, soft_cap=cap).items():
                what = f"attention {name}, window {window}, cap {cap}"
                yield _row(what, dtype, way, found)


def _row(operation: str, dtype: torch.dtype, way: str, found: equal_rows.Compared) -> Row:
    labels = {"operation": operation, "dtype": str(dtype).removeprefix("torch."), "way": way}
    return {"table": "rows", **labels, **found._asdict()}


def _model(setting: Setting, name: str) -> Iterator[Row]:
    model, _ = random_model(name, setting.device, setting.dtype)
    layout = KVLayout.of(model.spec.layers, PAGE_SIZE, model.dtype, None, model.spec.draft)
    found = differing_operation(model, layout)
    labels = {"model": name, "dtype": str(setting.dtype).removeprefix("torch.")}
    yield {"table": "models", **labels, "operation": found or "none", "differing": int(bool(found))}
