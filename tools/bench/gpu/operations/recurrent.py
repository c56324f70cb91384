"""The recurrence of Qwen3-Next's delta net: one long prompt, short prompts, and decode steps.

A prompt is limited by the instructions of its chunks, which run one after the other, so its share
of the bandwidth is small.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from kernels.backends.chosen import DeltaRule
from kernels.linear_attention.causal_conv import causal_conv, causal_conv_reference
from kernels.linear_attention.delta_rule import Gates, delta_rule, delta_rule_reference
from kernels.linear_attention.state_cells import CellView, StateRows
from tools.bench.gpu.ops import Op, relative_error
from tools.bench.gpu.setting import Setting

# Key heads, value heads per key head, size of a key, size of a value.
SHAPE, DRY_SHAPE = (16, 2, 128, 128), (1, 2, 16, 16)
WIDTH = 4  # tokens of the convolution
ROWS = ((8192,), (512,) * 16, (1,) * 64)
DRY_ROWS = ((20,), (1, 1))
TOLERANCE = 2e-2


def ops(setting: Setting) -> Iterator[Callable[[], Op]]:
    for counts in setting.sized(ROWS, DRY_ROWS):
        yield partial(_delta_rule, setting, counts, delta_rule)
        yield partial(_causal_conv, setting, counts)


def prompts(setting: Setting, rule: DeltaRule) -> Iterator[Callable[[], Op]]:
    """Yield the operations over prompts, computed by `rule`."""
    for counts in setting.sized(ROWS, DRY_ROWS)[:-1]:
        yield partial(_delta_rule, setting, counts, rule)


def _delta_rule(setting: Setting, counts: tuple[int, ...], rule: DeltaRule) -> Op:
    heads, group, k_size, v_size = setting.sized(SHAPE, DRY_SHAPE)
    x = setting.randn(sum(counts), heads, 2 * k_size + group * v_size)
    gates = Gates(
        setting.randn(sum(counts), heads, group),
        setting.randn(sum(counts), heads, group),
        torch.zeros(heads * group, device=setting.device),
        torch.zeros(heads * group, device=setting.device),
    )
    states = torch.empty(len(counts), heads * group, k_size, v_size, device=setting.device)
    cells, rows = CellView(states, 0, 0, 1, heads * group), _rows(setting, counts)

    def error() -> float:
        found = rule(x, gates, cells, rows)
        return relative_error(found, delta_rule_reference(x, gates, cells, rows))

    values = heads * group * v_size * x.element_size() * sum(counts)
    return _op("delta_rule", counts, lambda: rule(x, gates, cells, rows), error,
               x.nbytes + values + states.nbytes)  # fmt: skip


def _causal_conv(setting: Setting, counts: tuple[int, ...]) -> Op:
    heads, group, k_size, v_size = setting.sized(SHAPE, DRY_SHAPE)
    channels = 2 * k_size + group * v_size
    x = setting.randn(sum(counts), heads * channels)
    columns = torch.arange(heads * channels, dtype=torch.int32, device=setting.device)
    columns, weight = columns.view(heads, channels), setting.randn(heads, channels, WIDTH)
    inputs = setting.randn(len(counts), heads, channels, WIDTH - 1)
    cells, rows = CellView(inputs, 0, 0, 1, heads), _rows(setting, counts)

    def error() -> float:
        found = causal_conv(x, columns, weight, cells, rows)
        return relative_error(found, causal_conv_reference(x, columns, weight, cells, rows))

    return _op("causal_conv", counts, lambda: causal_conv(x, columns, weight, cells, rows), error,
               2 * x.nbytes + inputs.nbytes)  # fmt: skip


def _op(
    name: str,
    counts: tuple[int, ...],
    call: Callable[[], Tensor],
    error: Callable[[], float],
    amount: int,
) -> Op:
    return Op(
        name=name,
        shape=f"{len(counts)} rows of {counts[0]}",
        call=call,
        error=error,
        tolerance=TOLERANCE,
        ceiling="copy",
        amount=amount,
    )


def _rows(setting: Setting, counts: tuple[int, ...]) -> StateRows:
    """Return rows that start without a state and write one."""
    on_device = partial(torch.tensor, dtype=torch.int32, device=setting.device)
    nowhere = on_device([[-1]] * len(counts))
    decodes = len(counts) if counts[0] == 1 else 0
    writes, marks = on_device([[row] for row in range(len(counts))]), on_device([0] * len(counts))
    starts = on_device([0, *accumulate(counts)])
    return StateRows(starts, nowhere, writes, marks, nowhere, decodes)
