"""Part attention: decode and verify against the read bandwidth, extend against matrix products.

Peers of extend are torch's own kernels on contiguous tensors, which a paged cache does not have.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kernels.attention.paged import plan_attention
from kernels.backends.chosen import PlanAttention
from kernels.backends.flashinfer import FlashInfer
from tools.bench.gpu.clock import Work
from tools.bench.gpu.frame import Row, Tables, note
from tools.bench.gpu.operations import latents
from tools.bench.gpu.operations.paged import (
    TOLERANCE,
    Heads,
    Paged,
    Rows,
    attention_op,
    envelope,
    num_pages_of,
    paged,
)
from tools.bench.gpu.ops import COLUMNS, Op, calls, measure_package
from tools.bench.gpu.ops import measure as measure_ops
from tools.bench.gpu.setting import Setting

TABLES: Tables = {
    "decode": COLUMNS,
    "verify": COLUMNS,
    "extend": COLUMNS,
    "gated": COLUMNS,
    "plan": COLUMNS,
    "latents": COLUMNS,
    "flashinfer": COLUMNS,
    "skew": {
        "rows": "{shape}",
        "share of the read bandwidth": "{share:.0%}",
        "of the uniform batch's": "{of_uniform:.0%}",
    },
}

LARGE, SMALL = Heads(32, 8, 128), Heads(16, 8, 128)  # of 8B models and of Qwen3-0.6B
GATED = Heads(16, 2, 256)  # of Qwen3-Next
DRY = Heads(4, 2, 32)
PAGE_SIZE = 16
VERIFIED = 4  # tokens of a row with three drafts
LAYERS = 4  # layers in the pool, so that one layer's blocks are not adjacent


def compile_calls(setting: Setting) -> Iterator[Callable[[], object]]:
    """Yield calls that need the same kernels as `measure`."""
    for heads in setting.sized((LARGE, SMALL), (DRY,)):
        extends = (Rows.extend(64, new) for new in (VERIFIED, 64, 2048))
        for rows in (Rows.decode([64]), *extends):
            yield partial(_call_once, setting, rows, heads)
    yield from calls(chain(latents.ops(setting), _gated(setting)))


def measure(setting: Setting) -> Iterator[Row]:
    setting.launch_kernels()
    yield from measure_ops(setting, _decodes(setting), "decode")
    yield from _skew(setting)
    yield from measure_ops(setting, _verifies(setting), "verify")
    yield from measure_ops(setting, _extends(setting), "extend")
    yield from measure_ops(setting, _gated(setting), "gated")
    yield from measure_ops(setting, _plans(setting), "plan")
    yield from measure_ops(setting, latents.ops(setting), "latents")
    yield from measure_package(setting, flashinfer_ops, "flashinfer")


def flashinfer_ops(setting: Setting) -> Iterator[Callable[[], Op]]:
    """Yield the same operations with plans of FlashInfer. Raises Unavailable."""
    planner = FlashInfer.open(setting.device).plan_attention
    kinds = (_decodes, _verifies, _extends, _gated, latents.ops)
    return chain.from_iterable(ops(setting, planner) for ops in kinds)


def _decodes(
    setting: Setting, planner: PlanAttention = plan_attention
) -> Iterator[Callable[[], Op]]:
    wanted = ((64, 8192), (1, 1024), (16, 1024), (64, 1024), (256, 1024))
    others = ((1, 8192), (16, 8192), (256, 8192))
    for heads in setting.sized((LARGE, SMALL), (DRY,)):
        for batch, context in setting.sized((*wanted, *others), ((2, 40),)):
            case = f"decode {batch} x {context}"
            # Odd lengths, so that last pages are partly filled with other data.
            lengths = [context - row % 7 for row in range(batch)]
            yield partial(_decode, setting, case, Rows.decode(lengths), heads, planner)


def _verifies(
    setting: Setting, planner: PlanAttention = plan_attention
) -> Iterator[Callable[[], Op]]:
    """Yield verify steps of one row, whose keys must be split, and of many rows."""
    heads = setting.sized(LARGE, DRY)
    cases = ((1, 1024), (1, 8192), (1, 32768), (16, 8192), (64, 8192))
    for batch, context in setting.sized(cases, ((2, 40),)):
        lengths = tuple(context - row % 7 for row in range(batch))
        rows = Rows((VERIFIED,) * batch, lengths)
        yield partial(_decode, setting, f"verify {batch} x {context}", rows, heads, planner)


def _decode(
    setting: Setting,
    case: str,
    rows: Rows,
    heads: Heads,
    planner: PlanAttention = plan_attention,
) -> Op:
    kind, _, shape = case.partition(" ")
    more = {"case": case, "heads": str(heads)}
    data = make_data(setting, rows, heads)
    return attention_op(kind, f"{shape}, {heads}", data, "read", planner, more=more)


def _skew(setting: Setting) -> Iterator[Row]:
    """Measure one long row among short ones, and the same number of tokens in equal rows."""
    heads = setting.sized(LARGE, DRY)
    long, short, count = setting.sized((65536, 2048, 31), (50, 20, 2))
    mean = (long + count * short) // (count + 1)
    batches = {
        f"{count + 1} x {mean}": [mean] * (count + 1),
        f"1 x {long} and {count} x {short}": [long] + [short] * count,
    }
    ops = (
        partial(_decode, setting, f"decode {name}", Rows.decode(lengths), heads)
        for name, lengths in batches.items()
    )
    rows = list(measure_ops(setting, ops, "skew"))
    shares = [row["share"] for row in rows if row["table"] == "skew"]
    for row in rows:
        if len(shares) < len(batches):
            yield note("skewed batches", f"not both were measured: {row.get('note', row)}")
        else:
            yield row | {"of_uniform": row["share"] / shares[0]}


def _extends(
    setting: Setting, planner: PlanAttention = plan_attention
) -> Iterator[Callable[[], Op]]:
    for heads in setting.sized((LARGE, SMALL), (DRY,)):
        for prefix, new in setting.sized(
            ((0, 8192), (0, 1024), (8192, 2048), (8192, 256), (32768, 64)), ((0, 20), (18, 9))
        ):
            yield partial(_extend, setting, prefix, new, heads, planner)


def _extend(setting: Setting, prefix: int, new: int, heads: Heads, planner: PlanAttention) -> Op:
    data = make_data(setting, Rows.extend(prefix, new), heads)
    more, peers = (
        {"case": f"extend {new} after {prefix}", "heads": str(heads)},
        _peers(data, prefix),
    )
    shape = f"{new} after {prefix}, {heads}"
    return attention_op("extend", shape, data, "matmul", planner, peers=peers, more=more)


def _gated(setting: Setting, planner: PlanAttention = plan_attention) -> Iterator[Callable[[], Op]]:
    """Yield steps whose attention multiplies its outputs by the sigmoid of gates."""
    heads = setting.sized(GATED, DRY)
    for batch, context in setting.sized(((1, 8192), (64, 8192)), ((2, 40),)):
        for queries in (1, VERIFIED):
            rows = Rows((queries,) * batch, tuple(context - row % 7 for row in range(batch)))
            shape = f"{queries} of {batch} x {context}"
            yield partial(_gated_op, setting, shape, rows, heads, planner)
    for prefix, new in setting.sized(((0, 8192), (8192, 2048)), ((18, 20),)):
        rows = Rows.extend(prefix, new)
        yield partial(_gated_op, setting, f"{new} after {prefix}", rows, heads, planner)


def _gated_op(setting: Setting, shape: str, rows: Rows, heads: Heads, planner: PlanAttention) -> Op:
    data = make_data(setting, rows, heads).gated(setting)
    ceiling = "matmul" if max(rows.queries) > VERIFIED else "read"
    return attention_op("gated attention", f"{shape}, {heads}", data, ceiling, planner)


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


def _plans(setting: Setting) -> Iterator[Callable[[], Op]]:
    """Yield the operations that a step runs once, independent of the number of layers."""
    heads = setting.sized(LARGE, DRY)
    for batch, context in setting.sized(((1, 1024), (64, 1024), (256, 1024)), ((2, 20),)):
        yield partial(_plan, setting, Rows.decode([context] * batch), heads)
    yield partial(_plan, setting, Rows.extend(0, setting.sized(8192, 20)), heads)


def _plan(setting: Setting, rows: Rows, heads: Heads) -> Op:
    data = make_data(setting, rows, heads)
    kind = "decode" if max(rows.queries) == 1 else "extend"
    return Op(
        name=f"plan of {kind}",
        shape=f"{len(rows.lengths)} x {rows.lengths[0]}",
        call=data.plan,
        error=data.error,
        tolerance=TOLERANCE,
        ceiling="copy",
        amount=data.lengths.nbytes + data.query_starts.nbytes,
        cold=False,
    )


def _call_once(setting: Setting, rows: Rows, heads: Heads) -> None:
    make_data(setting, rows, heads).attention()()


def make_data(setting: Setting, rows: Rows, heads: Heads) -> Paged:
    """Make rows over a pool like that of serving."""
    pages = num_pages_of(rows, PAGE_SIZE)
    kv = envelope(setting, heads, pages, PAGE_SIZE, LAYERS)
    return paged(setting, rows, heads.heads, kv)
