"""A sample of public kernel measurements, against which tests compare the GPU constants."""

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from simulation.cost.kernels import BYTES, Gpu

SAMPLE = Path(__file__).parent / "sample.csv"
HEAD_DIM = 128  # head size of all attention in the sample


class KernelTime(msgspec.Struct, frozen=True):
    """A measured kernel.

    Attributes:
        kernel: "product", "decode", "prefill" or "experts".
        shape: product: m, n, k. decode: rows, context, KV heads. prefill: rows, tokens, heads.
            experts: tokens, hidden, intermediate, experts per token, experts.
    """

    gpu: str
    framework: str
    kernel: str
    shape: tuple[int, ...]
    us: float

    def predicted_us(self, gpu: Gpu) -> float:
        """Return the time predicted with the constants of `gpu`, in microseconds."""
        return 1e6 * _PREDICTED_S[self.kernel](gpu, *self.shape)


def _decode_s(gpu: Gpu, rows: int, context: int, kv_heads: int) -> float:
    kv_bytes = rows * context * 2 * kv_heads * HEAD_DIM * BYTES
    return gpu.decode.seconds(gpu.sheet, kv_bytes, rows * kv_heads)


def _prefill_s(gpu: Gpu, rows: int, tokens: int, heads: int) -> float:
    row = gpu.prefill.row_seconds(gpu.sheet, 0, tokens, heads * HEAD_DIM, window=tokens)
    return rows * row + gpu.prefill.start_us * 1e-6


_PREDICTED_S: Mapping[str, Callable[..., float]] = {
    "product": lambda gpu, *shape: gpu.product.seconds(gpu.sheet, *shape),
    "decode": _decode_s,
    "prefill": _prefill_s,
    "experts": lambda gpu, *shape: gpu.experts.seconds(gpu.sheet, *shape),
}


def sample() -> Iterator[KernelTime]:
    with SAMPLE.open() as file:
        for row in csv.DictReader(file):
            shape = tuple(map(int, row["shape"].split("x")))
            yield KernelTime(row["gpu"], row["framework"], row["kernel"], shape, float(row["us"]))
