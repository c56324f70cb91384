"""Part layout: decode attention over page envelopes and over one pool per layer, by page size.

An envelope has all layers of a page in one block, so that a page is one transfer. This part
measures what the layout costs attention.
"""

from collections.abc import Iterator
from functools import partial

from tools.bench.gpu.operation import Make, Op, calls, measure_ops
from tools.bench.gpu.operations.paged import DRY, LARGE, Rows, pages_of
from tools.bench.gpu.process import Row
from tools.bench.gpu.setting import Setting, Work

LAYERS = {"page envelope": 32, "per layer": 1}


def compile_calls(setting: Setting) -> Iterator[Work]:
    """Yield calls that need the same kernels as `measure`."""
    return calls(_ops(setting, 1, 64))


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    for batch, context in setting.sized(((64, 4096), (1, 8192)), ((2, 40),)):
        yield from measure_ops(setting, _ops(setting, batch, context), "layout")


def _ops(setting: Setting, batch: int, context: int) -> Iterator[Make]:
    for page_size in setting.sized((16, 32, 64, 128), (16, 32)):
        for kind, layers in LAYERS.items():
            layers = setting.sized(layers, min(layers, 3))
            yield partial(_op, setting, kind, batch, context, page_size, layers)


def _op(setting: Setting, kind: str, batch: int, context: int, page_size: int, layers: int) -> Op:
    heads, rows = setting.sized(LARGE, DRY), Rows.batch(batch, context)
    data = pages_of(setting, rows, heads, page_size, layers)
    return data.op(kind, f"page {page_size}, {batch} x {context}, {heads}", "read")
