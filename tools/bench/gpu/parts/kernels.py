"""Part kernels: every operation of a step except attention, on the shapes of an 8B model."""

from collections.abc import Iterator

from kernels.backends.fla import FlashLinearAttention
from tools.bench.gpu.operation import Make, calls, measure_ops, measure_package
from tools.bench.gpu.operations import elementwise, logits, products
from tools.bench.gpu.process import Row
from tools.bench.gpu.setting import Setting, Work

OPS = {
    "logits": logits.ops,
    "elementwise": elementwise.ops,
    "linear": products.linear_ops,
    "experts": products.expert_ops,
    "pages": elementwise.page_ops,
    "recurrent": products.recurrent_ops,
}


def compile_calls(setting: Setting) -> Iterator[Work]:
    """Yield calls that need the same kernels as `measure`."""
    for name in OPS.keys() - {"linear"}:
        yield from calls(OPS[name](setting))


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    for name, ops in OPS.items():
        yield from measure_ops(setting, ops(setting), name)
    yield from measure_package(setting, fla_ops, "fla")


def fla_ops(setting: Setting) -> Iterator[Make]:
    """Return the delta rule over prompts by flash-linear-attention. Raises Unavailable."""
    return products.delta_rule_ops(setting, FlashLinearAttention.open().delta_rule)
