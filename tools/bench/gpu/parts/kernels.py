"""Part kernels: every operation of a step except attention, on the shapes of an 8B model."""

from collections.abc import Callable, Iterator

from kernels.backends.fla import FlashLinearAttention
from tools.bench.gpu.frame import Row, Tables
from tools.bench.gpu.operations import elementwise, experts, linear, logits, pages, recurrent
from tools.bench.gpu.ops import COLUMNS, Op, calls, measure_package
from tools.bench.gpu.ops import measure as measure_ops
from tools.bench.gpu.setting import Setting

OPS = {
    "logits": logits.ops,
    "elementwise": elementwise.ops,
    "linear": linear.ops,
    "experts": experts.ops,
    "pages": pages.ops,
    "recurrent": recurrent.ops,
}
TABLES: Tables = dict.fromkeys((*OPS, "fla"), COLUMNS)


def compile_calls(setting: Setting) -> Iterator[Callable[[], object]]:
    """Yield calls that need the same kernels as `measure`."""
    for name in ("logits", "elementwise", "experts", "pages", "recurrent"):
        yield from calls(OPS[name](setting))


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    for name, ops in OPS.items():
        yield from measure_ops(setting, ops(setting), name)
    yield from measure_package(setting, fla_ops, "fla")


def fla_ops(setting: Setting) -> Iterator[Callable[[], Op]]:
    """Return the delta rule over prompts by flash-linear-attention. Raises Unavailable."""
    return recurrent.prompts(setting, FlashLinearAttention.open().delta_rule)
