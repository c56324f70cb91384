"""The matrix products of an 8B model's step, experts, and the recurrence of Qwen3-Next's delta net.

A decode step streams the weights once, and a prefill multiplies. Products with 16-bit weights are
torch's own: their share of the read bandwidth is an upper bound for a whole step. A prompt of the
delta rule is limited by the instructions of its chunks, which run one after the other, so its share
of the bandwidth is small.
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.linear.matrix import Matrix
from kernels.backends.chosen import DeltaRule
from kernels.experts.grouped_mlp import ExpertMatrices, by_expert, grouped_mlp
from kernels.experts.routing import Routing, route
from kernels.experts.shared_expert import add_gated
from kernels.layers.act_and_mul import act_and_mul_reference
from kernels.layers.quantised_linear import quantised_linear
from kernels.linear_attention.causal_conv import causal_conv, causal_conv_reference
from kernels.linear_attention.delta_rule import Gates, delta_rule, delta_rule_reference
from kernels.linear_attention.state_cells import CellView, StateRows
from kernels.quantised import NumberKind, QuantFormat, Quantisation, widened
from tools.bench.gpu.operation import Compared, Make, Op
from tools.bench.gpu.setting import Floor, Setting

# name: (in, out), of Llama-3-8B.
SHAPES = {
    "qkv": (4096, 6144),
    "output": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "head": (4096, 128256),
}
DRY_SHAPES = {"qkv": (64, 96)}
KINDS: tuple[NumberKind, ...] = ("int8", "fp8", "int4", "fp4")
# hidden, inner, experts, experts per token of Qwen3-30B-A3B and Mixtral-8x7B.
EXPERTS = {"qwen3": (2048, 768, 128, 8), "mixtral": (4096, 14336, 8, 2)}
DRY_EXPERTS = {"qwen3": (64, 32, 8, 2)}
MANY = 1024  # tokens from which the arithmetic of experts is the limit
# Key heads, value heads per key head, size of a key, size of a value.
DELTA_NET, DRY_DELTA_NET = (16, 2, 128, 128), (1, 2, 16, 16)
WIDTH = 4  # tokens of the convolution
PROMPTS = ((8192,), (512,) * 16)
STEPS = ((1,) * 64,)
LINEAR_TOLERANCE, TOLERANCE = 1e-2, 2e-2


def linear_ops(setting: Setting) -> Iterator[Make]:
    counts = setting.sized((1, 16, 64, 256), (1, 3))
    for name, sizes in setting.sized(SHAPES, DRY_SHAPES).items():
        yield from (partial(_linear, setting, name, rows, *sizes) for rows in counts)
    for kind in KINDS:
        yield from (partial(_quantised, setting, kind, rows) for rows in counts)


def expert_ops(setting: Setting) -> Iterator[Make]:
    for name, sizes in setting.sized(EXPERTS, DRY_EXPERTS).items():
        for rows in setting.sized((1, 16, 64, 256, 2048), (1, 3)):
            yield partial(_experts, setting, name, rows, *sizes)
    for rows in setting.sized((1, 64, 2048), (1, 3)):
        yield partial(_shared, setting, rows, setting.sized(2048, 64))


def recurrent_ops(setting: Setting) -> Iterator[Make]:
    for counts in setting.sized((*PROMPTS, *STEPS), ((20,), (1, 1))):
        yield partial(_delta_rule, setting, counts, delta_rule)
        yield partial(_causal_conv, setting, counts)


def delta_rule_ops(setting: Setting, rule: DeltaRule) -> Iterator[Make]:
    """Yield the delta rule over prompts, computed by `rule`."""
    for counts in setting.sized(PROMPTS, ((20,),)):
        yield partial(_delta_rule, setting, counts, rule)


def quantised_matrix(
    kind: NumberKind, codes: Tensor, scales: Tensor, zeros: Tensor
) -> tuple[Tensor, Quantisation]:
    """Return a matrix of `kind`, in groups of `group_of` inputs.

    Args:
        codes: uint8 [out, in], below 16.
        scales, zeros: float32 and uint8 [out, groups].
    """
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
    scales = scales.bfloat16() if kind == "fp4" else scales
    return Matrix(codes.to(dtype), QuantFormat(kind, group_of(kind)), scales, zeros).quantised()


def group_of(kind: NumberKind) -> int:
    """Return the number of inputs that share a scale. 0: all of a row."""
    return {"int8": 0, "fp8": 128, "int4": 128, "fp4": 32}[kind]


def _linear(setting: Setting, name: str, rows: int, size_in: int, size_out: int) -> Op:
    weight, x = setting.randn(size_out, size_in), setting.randn(rows, size_in)
    few = slice(0, size_out, max(1, size_out // 256))
    return Op(
        f"linear {name}",
        f"[{rows}, {size_in}] to {size_out}",
        lambda: F.linear(x, weight),
        Floor("read", weight.nbytes + x.nbytes + rows * size_out * weight.element_size()),
        lambda found: [(found[:, few], F.linear(x.double(), weight[few].double()))],
        LINEAR_TOLERANCE,
    )


def _quantised(setting: Setting, kind: NumberKind, rows: int) -> Op:
    size_in, size_out = setting.sized(SHAPES["gate_up"], (128, 96))
    x, codes = setting.randn(rows, size_in), setting.integers(16, size_out, size_in)
    zeros = codes[:, :: group_of(kind) or size_in].contiguous().to(torch.uint8)
    scales = torch.full(zeros.shape, size_in**-0.5, device=x.device)
    numbers, own = quantised_matrix(kind, codes.to(torch.uint8), scales, zeros)
    moved = numbers.nbytes + own.nbytes + x.nbytes + rows * size_out * x.element_size()
    return Op(
        f"linear {kind}",
        f"[{rows}, {size_in}] to {size_out}",
        lambda: quantised_linear(x, numbers, own),
        Floor("read", moved),
        lambda found: [(found, x.float() @ widened(numbers, own).t())],
        LINEAR_TOLERANCE,
    )


def _experts(
    setting: Setting, name: str, rows: int, hidden: int, inner: int, count: int, k: int
) -> Op:
    x = setting.randn(rows, hidden)
    gate_up = setting.randn(count, 2 * inner, hidden).mul_(hidden**-0.5)
    down = setting.randn(count, hidden, inner).mul_(inner**-0.5)
    weights, ids = route(setting.randn(rows, count), Routing(k, normalise=True))
    matrices = ExpertMatrices(gate_up), ExpertMatrices(down)
    selected = len(set(ids.flatten().tolist())) * 3 * hidden * inner * x.element_size()

    def exact(expert: int, of_it: Tensor) -> Tensor:
        between = act_and_mul_reference(of_it @ gate_up[expert].float().t(), "silu")
        return between @ down[expert].float().t()

    def compare(found: Tensor) -> Compared:
        few = slice(0, min(rows, 8))
        return [(found[few], by_expert(x[few].float(), weights[few], ids[few], exact, count))]

    products = Floor("matmul", 2.0 * rows * k * 3 * hidden * inner)
    return Op(
        f"experts {name}",
        f"[{rows}, {hidden}], {k} of {count} x {inner}",
        lambda: grouped_mlp(x, *matrices, weights, ids, "silu"),
        products if rows >= MANY else Floor("read", selected + 2 * x.nbytes),
        compare,
        TOLERANCE,
    )


def _shared(setting: Setting, rows: int, hidden: int) -> Op:
    y, shared, x = (setting.randn(rows, hidden) for _ in range(3))
    weight = setting.randn(1, hidden).mul_(hidden**-0.5)

    def compare(found: Tensor) -> Compared:
        gates = torch.sigmoid(x.float() @ weight.float().t())
        return [(found, y.float() + shared.float() * gates)]

    return Op(
        "add shared expert",
        f"[{rows}, {hidden}]",
        lambda: add_gated(y, shared, x, weight),
        Floor("copy", 4 * y.nbytes),
        compare,
        TOLERANCE,
    )


def _delta_rule(setting: Setting, counts: tuple[int, ...], rule: DeltaRule) -> Op:
    heads, group, k_size, v_size = setting.sized(DELTA_NET, DRY_DELTA_NET)
    tokens, zeros = sum(counts), torch.zeros(heads * group, device=setting.device)
    x = setting.randn(tokens, heads, 2 * k_size + group * v_size)
    gates = Gates(
        setting.randn(tokens, heads, group), setting.randn(tokens, heads, group), zeros, zeros
    )
    states = torch.empty(len(counts), heads * group, k_size, v_size, device=setting.device)
    given = x, gates, CellView(states, 0, 0, 1, heads * group), _state_rows(setting, counts)
    values = heads * group * v_size * x.element_size() * tokens
    return Op(
        "delta_rule",
        f"{len(counts)} rows of {counts[0]}",
        partial(rule, *given),
        Floor("copy", x.nbytes + values + states.nbytes),
        lambda found: [(found, delta_rule_reference(*given))],
        TOLERANCE,
    )


def _causal_conv(setting: Setting, counts: tuple[int, ...]) -> Op:
    heads, group, k_size, v_size = setting.sized(DELTA_NET, DRY_DELTA_NET)
    channels = 2 * k_size + group * v_size
    x = setting.randn(sum(counts), heads * channels)
    columns = torch.arange(heads * channels, dtype=torch.int32, device=setting.device)
    columns, weight = columns.view(heads, channels), setting.randn(heads, channels, WIDTH)
    inputs = setting.randn(len(counts), heads, channels, WIDTH - 1)
    cells = CellView(inputs, 0, 0, 1, heads)
    given = x, columns, weight, cells, _state_rows(setting, counts)
    return Op(
        "causal_conv",
        f"{len(counts)} rows of {counts[0]}",
        lambda: causal_conv(*given),
        Floor("copy", 2 * x.nbytes + inputs.nbytes),
        lambda found: [(found, causal_conv_reference(*given))],
        TOLERANCE,
    )


def _state_rows(setting: Setting, counts: tuple[int, ...]) -> StateRows:
    """Return rows that start without a state and write one."""
    on_device = partial(torch.tensor, dtype=torch.int32, device=setting.device)
    nowhere = on_device([[-1]] * len(counts))
    decodes = len(counts) if counts[0] == 1 else 0
    writes, marks = on_device([[row] for row in range(len(counts))]), on_device([0] * len(counts))
    starts = on_device([0, *accumulate(counts)])
    return StateRows(starts, nowhere, writes, marks, nowhere, decodes)
