"""The matrix products of a decode step of an 8B model, each of which streams its weights once.

For 16-bit weights they are torch's own. Their share of the read bandwidth is an upper bound for a
whole step.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.linear.matrix import Matrix
from kernels.layers.quantised_linear import quantised_linear
from kernels.quantised import NumberKind, QuantFormat, widened
from tools.bench.gpu.ops import Op, relative_error
from tools.bench.gpu.setting import Setting

# name: (in, out), of Llama-3-8B.
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
    kinds: tuple[NumberKind, ...] = ("int8", "fp8", "int4", "fp4")
    for kind in kinds:
        for rows in setting.sized((1, 16, 64, 256), (1, 3)):
            yield partial(_quantised, setting, kind, rows)


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


def _quantised(setting: Setting, kind: NumberKind, rows: int) -> Op:
    size_in, size_out = setting.sized(SHAPES["gate_up"], (128, 96))
    group = {"int8": 0, "fp8": 128, "int4": 128, "fp4": 32}[kind]
    form, x = QuantFormat(kind, group), setting.randn(rows, size_in)
    codes = setting.integers(16, size_out, size_in).to(torch.uint8)
    zeros = codes[:, :: group or size_in].contiguous()
    scales = torch.full(zeros.shape, size_in**-0.5, device=x.device)
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
    scales = scales.bfloat16() if kind == "fp4" else scales
    numbers, quantisation = Matrix(codes.to(dtype), form, scales, zeros).quantised()

    def call() -> Tensor:
        return quantised_linear(x, numbers, quantisation)

    def error() -> float:
        return relative_error(call(), x.float() @ widened(numbers, quantisation).t())

    return Op(
        name=f"linear {kind}",
        shape=f"[{rows}, {size_in}] to {size_out}",
        call=call,
        error=error,
        tolerance=TOLERANCE,
        ceiling="read",
        amount=numbers.nbytes + quantisation.nbytes + x.nbytes + rows * size_out * x.element_size(),
    )
