"""Part attention: decode and verify against the read bandwidth, extend against matrix products.

Peers of extend are torch's own kernels on contiguous tensors, which a paged cache does not have.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kernels.attention.paged import plan_attention
from kernels.backends.chosen import PlanAttention
from kernels.backends.flashinfer import FlashInfer
from tools.bench.gpu.operation import Make, Op, calls, measure_ops, measure_package
from tools.bench.gpu.operations import latents
from tools.bench.gpu.operations.paged import (
    DRY,
    GATED,
    LARGE,
    SMALL,
    TOLERANCE,
    Heads,
    Paged,
    Rows,
    pages_of,
)
from tools.bench.gpu.process import Row, note
from tools.bench.gpu.setting import Floor, Setting, Work

VERIFIED = 4  # tokens of a row with three drafts
# Rows and tokens of each, the most important ones first.
DECODES = ((64, 8192), (1, 1024), (16, 1024), (64, 1024), (256, 1024),
           (1, 8192), (16, 8192), (256, 8192))  # fmt: skip
VERIFIES = ((1, 1024), (1, 8192), (1, 32768), (16, 8192), (64, 8192))  # one row: keys are split
PLANS = ((1, 1024), (64, 1024), (256, 1024))
DRY_BATCHES = ((2, 40),)
# Tokens in the cache, and new ones.
EXTENDS = ((0, 8192), (0, 1024), (8192, 2048), (8192, 256), (32768, 64))
DRY_EXTENDS = ((0, 20), (18, 9))


def compile_calls(setting: Setting) -> Iterator[Work]:
    """Yield calls that need the same kernels as `measure`."""
    extends = (Rows.extend(64, new) for new in (VERIFIED, 64, 2048))
    for rows in (Rows.batch(1, 64), *extends):
        for heads in setting.sized((LARGE, SMALL), (DRY,)):
            yield from calls([partial(_op, setting, "", "", rows, heads, "read", plan_attention)])
    yield from calls(chain(latents.ops(setting), _gated(setting)))


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    yield from measure_ops(setting, _decodes(setting), "decode")
    yield from _skew(setting)
    others = {"verify": _verifies, "extend": _extends, "gated": _gated}
    for name, ops in {**others, "plan": _plans, "latents": latents.ops}.items():
        yield from measure_ops(setting, ops(setting), name)
    yield from measure_package(setting, flashinfer_ops, "flashinfer")


def flashinfer_ops(setting: Setting) -> Iterator[Make]:
    """Yield the same operations with plans of FlashInfer. Raises Unavailable."""
    planner = FlashInfer.open(setting.device).plan_attention
    kinds = (_decodes, _verifies, _extends, _gated, latents.ops)
    return chain.from_iterable(ops(setting, planner) for ops in kinds)


def _decodes(setting: Setting, planner: PlanAttention = plan_attention) -> Iterator[Make]:
    for heads in setting.sized((LARGE, SMALL), (DRY,)):
        for batch, context in setting.sized(DECODES, DRY_BATCHES):
            shape, rows = f"{batch} x {context}, {heads}", Rows.batch(batch, context)
            yield partial(_op, setting, "decode", shape, rows, heads, "read", planner)


def _verifies(setting: Setting, planner: PlanAttention = plan_attention) -> Iterator[Make]:
    heads = setting.sized(LARGE, DRY)
    for batch, context in setting.sized(VERIFIES, DRY_BATCHES):
        shape, rows = f"{batch} x {context}, {heads}", Rows.batch(batch, context, VERIFIED)
        yield partial(_op, setting, "verify", shape, rows, heads, "read", planner)


def _extends(setting: Setting, planner: PlanAttention = plan_attention) -> Iterator[Make]:
    for heads in setting.sized((LARGE, SMALL), (DRY,)):
        for prefix, new in setting.sized(EXTENDS, DRY_EXTENDS):
            yield partial(_extend, setting, prefix, new, heads, planner)


def _gated(setting: Setting, planner: PlanAttention = plan_attention) -> Iterator[Make]:
    """Yield steps whose attention multiplies its outputs by the sigmoid of gates."""
    heads = setting.sized(GATED, DRY)
    cases = [
        (f"{queries} of {batch} x {context}", Rows.batch(batch, context, queries), "read")
        for batch, context in setting.sized(((1, 8192), (64, 8192)), DRY_BATCHES)
        for queries in (1, VERIFIED)
    ]
    cases += [
        (f"{new} after {prefix}", Rows.extend(prefix, new), "matmul")
        for prefix, new in setting.sized(((0, 8192), (8192, 2048)), ((18, 20),))
    ]
    for shape, rows, ceiling in cases:
        name = "gated attention"
        yield partial(_op, setting, name, f"{shape}, {heads}", rows, heads, ceiling, planner, True)


def _plans(setting: Setting) -> Iterator[Make]:
    """Yield the operations that a step runs once, independent of the number of layers."""
    for batch, context in setting.sized(PLANS, ((2, 20),)):
        yield partial(_plan, setting, "decode", Rows.batch(batch, context))
    yield partial(_plan, setting, "extend", Rows.extend(0, setting.sized(8192, 20)))


def _op(
    setting: Setting,
    name: str,
    shape: str,
    rows: Rows,
    heads: Heads,
    ceiling: str,
    planner: PlanAttention = plan_attention,
    gated: bool = False,
) -> Op:
    data = pages_of(setting, rows, heads)
    return (data.gated(setting) if gated else data).op(name, shape, ceiling, planner)


def _extend(setting: Setting, prefix: int, new: int, heads: Heads, planner: PlanAttention) -> Op:
    data = pages_of(setting, Rows.extend(prefix, new), heads)
    shape = f"{new} after {prefix}, {heads}"
    return data.op("extend", shape, "matmul", planner, _peers(data, prefix))


def _plan(setting: Setting, kind: str, rows: Rows) -> Op:
    data = pages_of(setting, rows, setting.sized(LARGE, DRY))
    return Op(
        f"plan of {kind}",
        f"{len(rows.lengths)} x {rows.lengths[0]}",
        data.plan,
        Floor("copy", data.lengths.nbytes + data.query_starts.nbytes),
        lambda plan: data.compare(data.attention(plan)),
        TOLERANCE,
        cold=False,
    )


def _skew(setting: Setting) -> Iterator[Row]:
    """Measure one long row among short ones, and the same number of tokens in equal rows."""
    heads = setting.sized(LARGE, DRY)
    long, short, count = setting.sized((65536, 2048, 31), (50, 20, 2))
    mean = (long + count * short) // (count + 1)
    batches = {
        f"{count + 1} x {mean}": (mean,) * (count + 1),
        f"1 x {long} and {count} x {short}": (long, *(short,) * count),
    }
    ops = [
        partial(_op, setting, "decode", f"{name}, {heads}", Rows((1,) * len(lengths), lengths),
                heads, "read")
        for name, lengths in batches.items()
    ]  # fmt: skip
    rows = list(measure_ops(setting, ops, "skew"))
    measured = [row for row in rows if row["table"] == "skew"]
    if len(measured) < len(batches):
        yield note("skewed batches", f"not both were measured: {rows}")
        return
    for row in measured:
        yield row | {"of_uniform": row["share"] / measured[0]["share"]}


def _peers(data: Paged, prefix: int) -> Mapping[str, Work]:
    """Return peers, with keys and values repeated for every query head so that any kernel runs."""
    group = data.q.shape[1] // data.kv.shape[1]
    k, v = (x.repeat_interleave(group, dim=0)[None] for x in data.contiguous(0))
    q = data.q.transpose(0, 1)[None].contiguous()

    def attend(backend: SDPBackend) -> object:
        with sdpa_kernel(backend):
            if not prefix:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            bias = causal_lower_right(q.shape[2], k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return {
        "cuDNN": partial(attend, SDPBackend.CUDNN_ATTENTION),
        "flash": partial(attend, SDPBackend.FLASH_ATTENTION),
    }
