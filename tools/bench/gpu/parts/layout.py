"""Part layout: decode attention over page envelopes and over one pool per layer, by page size.

An envelope has all layers of a page in one block, so that a page is one transfer. This part
measures what the layout costs attention.
"""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from tools.bench.gpu.frame import Row, Tables
from tools.bench.gpu.operations.paged import (
    Heads,
    Rows,
    attention_op,
    envelope,
    num_pages_of,
    paged,
    per_layer,
)
from tools.bench.gpu.ops import COLUMNS, Op, calls
from tools.bench.gpu.ops import measure as measure_ops
from tools.bench.gpu.parts.attention import DRY, LARGE
from tools.bench.gpu.setting import Setting

TABLES: Tables = {"layout": COLUMNS}

LAYERS = 32


def compile_calls(setting: Setting) -> Iterator[Callable[[], object]]:
    """Yield calls that need the same kernels as `measure`."""
    yield from calls(_ops_of(setting, Rows.decode([64])))


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    yield from measure_ops(setting, _cases(setting), "layout")


def _cases(setting: Setting) -> Iterator[Callable[[], Op]]:
    for batch, context in setting.sized(((64, 4096), (1, 8192)), ((2, 40),)):
        yield from _ops_of(setting, Rows.decode([context] * batch))


def _ops_of(setting: Setting, rows: Rows) -> Iterator[Callable[[], Op]]:
    heads, layers = setting.sized((LARGE, LAYERS), (DRY, 3))
    for page_size in setting.sized((16, 32, 64, 128), (16, 32)):
        pages = num_pages_of(rows, page_size)
        kinds: dict[str, Callable[[], Tensor]] = {
            "page envelope": partial(envelope, setting, heads, pages, page_size, layers),
            "per layer": partial(per_layer, setting, heads, pages, page_size),
        }
        for kind, make in kinds.items():
            yield partial(_op, setting, rows, heads, kind, page_size, make)


def _op(
    setting: Setting,
    rows: Rows,
    heads: Heads,
    kind: str,
    page_size: int,
    make: Callable[[], Tensor],
) -> Op:
    shape = f"page {page_size}, {len(rows.lengths)} x {rows.lengths[0]}, {heads}"
    more = {"layout": kind, "page_size": page_size}
    data = paged(setting, rows, heads.heads, make())
    return attention_op(kind, shape, data, "read", more=more)
