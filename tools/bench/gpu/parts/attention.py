"""Part attention: decode and verify against the read bandwidth, extend against matrix products.

Peers of extend are torch's own kernels on contiguous tensors, which a paged cache does not have.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple

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


class Case(NamedTuple):
    """Attention on one shape. gated: outputs are multiplied by the sigmoid of gates."""

    op: str
    shape: str
    rows: Rows
    heads: Heads
    ceiling: str
    gated: bool = False


def _steps(op: str, heads: Heads, *batches: tuple[int, int], queries: int = 1) -> list[Case]:
    """Return decode or verify steps. batches: rows, and tokens of each."""
    return [
        Case(
            op, f"{count} x {context}, {heads}", Rows.batch(count, context, queries), heads, "read"
        )
        for count, context in batches
    ]


def _prompts(op: str, heads: Heads, *lengths: tuple[int, int], gated: bool = False) -> list[Case]:
    """Return chunks of prompts. lengths: tokens in the cache, and new ones."""
    return [
        Case(op, f"{new} after {old}, {heads}", Rows.extend(old, new), heads, "matmul", gated)
        for old, new in lengths
    ]


def _gated(heads: Heads, *batches: tuple[int, int]) -> list[Case]:
    """Return decode and verify steps with gates."""
    return [
        case._replace(op="gated attention", shape=f"{queries} of {case.shape}", gated=True)
        for queries in (1, VERIFIED)
        for case in _steps("", heads, *batches, queries=queries)
    ]


# The most important ones first.
DECODES = ((64, 8192), (1, 1024), (16, 1024), (64, 1024), (256, 1024))
MORE_DECODES = ((1, 8192), (16, 8192), (256, 8192))
VERIFIES = ((1, 1024), (1, 8192), (1, 32768), (16, 8192), (64, 8192))  # one row: keys are split
EXTENDS = ((0, 8192), (0, 1024), (8192, 2048), (8192, 256), (32768, 64))
CASES = {
    "decode": [
        case
        for heads in (LARGE, SMALL)
        for case in _steps("decode", heads, *DECODES, *MORE_DECODES)
    ],
    "verify": _steps("verify", LARGE, *VERIFIES, queries=VERIFIED),
    "extend": [case for heads in (LARGE, SMALL) for case in _prompts("extend", heads, *EXTENDS)],
    "gated": [
        *_gated(GATED, (1, 8192), (64, 8192)),
        *_prompts("gated attention", GATED, (0, 8192), (8192, 2048), gated=True),
    ],
}
DRY_CASES = {
    "decode": _steps("decode", DRY, (2, 40)),
    "verify": _steps("verify", DRY, (2, 40), queries=VERIFIED),
    "extend": _prompts("extend", DRY, (0, 20), (18, 9)),
    "gated": [*_gated(DRY, (2, 40)), *_prompts("gated attention", DRY, (18, 20), gated=True)],
}


def compile_calls(setting: Setting) -> Iterator[Work]:
    """Yield calls that need the same kernels as `measure`."""
    for heads in setting.sized((LARGE, SMALL), (DRY,)):
        few = _steps("", heads, (1, 64)) + _prompts("", heads, (64, VERIFIED), (64, 64), (64, 2048))
        yield from calls(partial(_op, setting, case) for case in few)
    yield from calls(chain(latents.ops(setting), _ops(setting, "gated")))


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    yield from measure_ops(setting, _ops(setting, "decode"), "decode")
    yield from _skew(setting)
    for name in ("verify", "extend", "gated"):
        yield from measure_ops(setting, _ops(setting, name), name)
    yield from measure_ops(setting, _plans(setting), "plan")
    yield from measure_ops(setting, latents.ops(setting), "latents")
    yield from measure_package(setting, flashinfer_ops, "flashinfer")


def flashinfer_ops(setting: Setting) -> Iterator[Make]:
    """Yield the same operations with plans of FlashInfer. Raises Unavailable."""
    planner = FlashInfer.open(setting.device).plan_attention
    paged = chain.from_iterable(_ops(setting, name, planner) for name in CASES)
    return chain(paged, latents.ops(setting, planner))


def _ops(setting: Setting, name: str, planner: PlanAttention = plan_attention) -> Iterator[Make]:
    cases = setting.sized(CASES, DRY_CASES)[name]
    return (partial(_op, setting, case, planner) for case in cases)


def _op(setting: Setting, case: Case, planner: PlanAttention = plan_attention) -> Op:
    data = pages_of(setting, case.rows, case.heads)
    data = data.gated(setting) if case.gated else data
    peers = _peers(data) if case.op == "extend" else {}
    return data.op(case.op, case.shape, case.ceiling, planner, peers)


def _plans(setting: Setting) -> Iterator[Make]:
    """Yield the operations that a step runs once, independent of the number of layers."""
    for batch, context in setting.sized(((1, 1024), (64, 1024), (256, 1024)), ((2, 20),)):
        yield partial(_plan, setting, "decode", Rows.batch(batch, context))
    yield partial(_plan, setting, "extend", Rows.extend(0, setting.sized(8192, 20)))


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
    cases = [
        Case("decode", f"{name}, {heads}", Rows((1,) * len(lengths), lengths), heads, "read")
        for name, lengths in batches.items()
    ]
    rows = list(measure_ops(setting, (partial(_op, setting, case) for case in cases), "skew"))
    measured = [row for row in rows if row["table"] == "skew"]
    if len(measured) < len(cases):
        yield note("skewed batches", f"not both were measured: {rows}")
        return
    for row in measured:
        yield row | {"of_uniform": row["share"] / measured[0]["share"]}


def _peers(data: Paged) -> Mapping[str, Work]:
    """Return peers, with keys and values repeated for every query head so that any kernel runs."""
    group = data.q.shape[1] // data.kv.shape[1]
    k, v = (x.repeat_interleave(group, dim=0)[None] for x in data.contiguous(0))
    q = data.q.transpose(0, 1)[None].contiguous()

    def attend(backend: SDPBackend) -> object:
        with sdpa_kernel(backend):
            if q.shape[2] == k.shape[2]:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            bias = causal_lower_right(q.shape[2], k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return {
        "cuDNN": partial(attend, SDPBackend.CUDNN_ATTENTION),
        "flash": partial(attend, SDPBackend.FLASH_ATTENTION),
    }
