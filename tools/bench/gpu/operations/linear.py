"""The matrix products of a decode step of an 8B model: each streams its weights once.

They are torch's own. Their share of the read bandwidth bounds that of a whole step.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch.nn.functional as F

from tools.bench.gpu.ops import Op, relative_error
from tools.bench.gpu.setting import Setting

# name: (in, out), of Llama-3-8B
SHAPES = {
    "qkv": (4096, 6144),
    "output": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "head": (4096, 128256),
}
DRY_SHAPES = {"qkv": (64, 96)}
TOLERANCE = 1e-2


def ops(setting: Setting) -> Iterator[Callable[[], Op]]:
    for name, (size_in, size_out) in setting.sized(SHAPES, DRY_SHAPES).items():
        for rows in setting.sized((1, 16, 64, 256), (1, 3)):
            yield partial(_linear, setting, name, rows, size_in, size_out)


def _linear(setting: Setting, name: str, rows: int, size_in: int, size_out: int) -> Op:
    weight, x = setting.randn(size_out, size_in), setting.randn(rows, size_in)

    def error() -> float:
        few = slice(0, size_out, max(1, size_out // 256))
        return relative_error(
            F.linear(x, weight)[:, few], F.linear(x.double(), weight[few].double())
        )

    return Op(
        name=f"linear {name}",
        shape=f"[{rows}, {size_in}] to {size_out}",
        call=lambda: F.linear(x, weight),
        error=error,
        tolerance=TOLERANCE,
        ceiling="read",
        amount=weight.nbytes + x.nbytes + rows * size_out * weight.element_size(),
    )
