"""The duration of single kernels on a GPU, in seconds. All numbers are bfloat16."""

from simulation.cost.gpus import Gpu

BYTES = 2  # of a bfloat16 number

_GEMM_BANDWIDTH_SHARE = 0.85
_GEMM_START_S = 4e-6
_DECODE_BANDWIDTH_SHARE = 0.9
_DECODE_START_S = 12e-6
_PREFILL_FLOPS_SHARE = 0.6
_PREFILL_HALF_TOKENS = 500  # tokens at which prefill attention reaches half its speed
_PREFILL_START_S = 10e-6
_EXPERTS_BANDWIDTH_SHARE = 0.75
_EXPERTS_FLOPS_SHARE = 0.5
_EXPERTS_IMBALANCE = 1.1
_EXPERTS_START_S = 20e-6
# Seconds to start, and bytes/s, by the number of ranks.
_ALL_REDUCE = {2: (2.5e-6, 156e9), 4: (6e-6, 110e9), 8: (6.4e-6, 74e9)}

TP_SIZES = (1, *_ALL_REDUCE)


def gemm_s(gpu: Gpu, m: int, n: int, k: int) -> float:
    """Return the time of a matrix product, (m, k) times (k, n)."""
    memory = BYTES * (n * k + m * k + m * n) / (_GEMM_BANDWIDTH_SHARE * gpu.bandwidth)
    compute = 2 * m * n * k / (gpu.gemm_flops_share * gpu.flops)
    p = gpu.gemm_sharpness
    longer, shorter = max(memory, compute), min(memory, compute)
    return float(longer * (1 + (shorter / longer) ** p) ** (1 / p)) + _GEMM_START_S


def decode_attention_s(gpu: Gpu, kv_bytes: int) -> float:
    """Return the time to attend one token of each row.

    Args:
        kv_bytes: KV of all rows in one layer of one rank.
    """
    return kv_bytes / (_DECODE_BANDWIDTH_SHARE * gpu.bandwidth) + _DECODE_START_S


def prefill_attention_s(gpu: Gpu, begin: int, end: int, width: int) -> float:
    """Return the time to attend the tokens from `begin` to `end` of one row, without the start of
    the kernel.

    Args:
        width: query heads of one rank times their size.
    """
    new = end - begin
    speed = _PREFILL_FLOPS_SHARE * gpu.flops * new / (new + _PREFILL_HALF_TOKENS)
    return 2 * (end * end - begin * begin) * width / speed


PREFILL_ATTENTION_START_S = _PREFILL_START_S


def all_reduce_s(tp: int, num_bytes: int) -> float:
    """Return the time of an all-reduce over NVLink between `tp` ranks, one of TP_SIZES."""
    if tp == 1:
        return 0.0
    start, speed = _ALL_REDUCE[tp]
    return start + num_bytes / speed


def experts_s(gpu: Gpu, weight_bytes: float, flops: float) -> float:
    """Return the time of the experts of a layer.

    Args:
        weight_bytes: of the experts that any token uses.
        flops: of all tokens.
    """
    memory = weight_bytes / (_EXPERTS_BANDWIDTH_SHARE * gpu.bandwidth)
    compute = flops / (_EXPERTS_FLOPS_SHARE * gpu.flops)
    return max(memory, compute) * _EXPERTS_IMBALANCE + _EXPERTS_START_S
