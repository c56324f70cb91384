"""The experts of a layer: a decode step streams the selected weights, a prefill multiplies."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.experts.grouped_mlp import ExpertMatrices, by_expert, grouped_mlp
from kernels.experts.routing import Routing, route
from kernels.experts.shared_expert import add_gated
from kernels.layers.act_and_mul import act_and_mul_reference
from tools.bench.gpu.ops import Op, relative_error
from tools.bench.gpu.setting import Setting

# hidden, inner, experts, experts per token of Qwen3-30B-A3B and Mixtral-8x7B.
SHAPES = {"qwen3": (2048, 768, 128, 8), "mixtral": (4096, 14336, 8, 2)}
DRY_SHAPES = {"qwen3": (64, 32, 8, 2)}
TOLERANCE = 2e-2
MANY = 1024  # tokens from which arithmetic is the limit


def ops(setting: Setting) -> Iterator[Callable[[], Op]]:
    for name, shape in setting.sized(SHAPES, DRY_SHAPES).items():
        for rows in setting.sized((1, 16, 64, 256, 2048), (1, 3)):
            yield partial(_experts, setting, name, rows, *shape)
    for rows in setting.sized((1, 64, 2048), (1, 3)):
        yield partial(_shared, setting, rows, setting.sized(2048, 64))


def _experts(
    setting: Setting, name: str, rows: int, hidden: int, inner: int, count: int, k: int
) -> Op:
    x = setting.randn(rows, hidden)
    gate_up = setting.randn(count, 2 * inner, hidden).mul_(hidden**-0.5)
    down = setting.randn(count, hidden, inner).mul_(inner**-0.5)
    weights, ids = route(setting.randn(rows, count), Routing(k, normalise=True))
    wanted = len(set(ids.flatten().tolist())) * 3 * hidden * inner * x.element_size()
    many = rows >= MANY

    def exact(expert: int, of_it: Tensor) -> Tensor:
        between = act_and_mul_reference(of_it @ gate_up[expert].float().t(), "silu")
        return between @ down[expert].float().t()

    def call() -> Tensor:
        return grouped_mlp(x, ExpertMatrices(gate_up), ExpertMatrices(down), weights, ids, "silu")

    def error() -> float:
        few = slice(0, min(rows, 8))
        expected = by_expert(x[few].float(), weights[few], ids[few], exact, count)
        return relative_error(call()[few], expected)

    return Op(
        name=f"experts {name}",
        shape=f"[{rows}, {hidden}], {k} of {count} x {inner}",
        call=call,
        error=error,
        tolerance=TOLERANCE,
        ceiling="matmul" if many else "read",
        amount=2.0 * rows * k * 3 * hidden * inner if many else wanted + 2 * x.nbytes,
    )


def _shared(setting: Setting, rows: int, hidden: int) -> Op:
    y, shared, x = (setting.randn(rows, hidden) for _ in range(3))
    weight = setting.randn(1, hidden).mul_(hidden**-0.5)

    def error() -> float:
        gates = torch.sigmoid(x.float() @ weight.float().t())
        return relative_error(add_gated(y, shared, x, weight), y.float() + shared.float() * gates)

    return Op(
        name="add shared expert",
        shape=f"[{rows}, {hidden}]",
        call=lambda: add_gated(y, shared, x, weight),
        error=error,
        tolerance=TOLERANCE,
        ceiling="copy",
        amount=4 * y.nbytes,
    )
