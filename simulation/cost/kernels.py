"""The GPUs of the cost model, and the duration of their kernels in seconds, in bfloat16.

Each kind of kernel has a few constants, which `python -m tools.calibrate` fits to public tables.
"""

import msgspec

BYTES = 2  # size of a bfloat16 number

# All-reduce over NVLink: seconds to start, and bytes/s, by number of ranks.
_ALL_REDUCE = {2: (2.5e-6, 156e9), 4: (6e-6, 110e9), 8: (6.4e-6, 74e9)}
TP_SIZES = (1, *_ALL_REDUCE)


class DataSheet(msgspec.Struct, frozen=True):
    """Figures from a GPU's manufacturer.

    Attributes:
        bandwidth: memory bandwidth in bytes/s.
        flops: dense bfloat16 operations/s.
        memory_bytes: memory as the driver reports it.
    """

    bandwidth: float
    flops: float
    memory_bytes: int


class MatrixProduct(msgspec.Struct, frozen=True):
    """Constants of matrix products.

    Attributes:
        sharpness: exponent that combines memory time and compute time. The larger it is, the more
            they overlap.
    """

    bandwidth_share: float
    flops_share: float
    sharpness: float
    start_us: float

    def seconds(self, sheet: DataSheet, m: int, n: int, k: int) -> float:
        """Return the time of an (m, k) matrix times a (k, n) matrix."""
        memory = BYTES * (n * k + m * k + m * n) / (self.bandwidth_share * sheet.bandwidth)
        compute = 2 * m * n * k / (self.flops_share * sheet.flops)
        longer, shorter = max(memory, compute), min(memory, compute)
        joined = longer * (1 + (shorter / longer) ** self.sharpness) ** (1 / self.sharpness)
        return float(joined) + self.start_us * 1e-6


class DecodeAttention(msgspec.Struct, frozen=True):
    """Constants of attention for one new token in each row.

    Attributes:
        tile_ns: nanoseconds for each KV head of each row.
    """

    bandwidth_share: float
    start_us: float
    tile_ns: float

    def seconds(self, sheet: DataSheet, kv_bytes: int, tiles: int) -> float:
        """Return the time for `kv_bytes` of KV, in `tiles` pairs of a row and a KV head."""
        reading = kv_bytes / (self.bandwidth_share * sheet.bandwidth)
        return reading + self.start_us * 1e-6 + tiles * self.tile_ns * 1e-9


class PrefillAttention(msgspec.Struct, frozen=True):
    """Constants of causal attention for many new tokens of a row.

    Attributes:
        half_tokens: new tokens of a row at which the kernel reaches half its speed.
    """

    flops_share: float
    half_tokens: float
    start_us: float

    def row_seconds(self, sheet: DataSheet, begin: int, end: int, width: int, window: int) -> float:
        """Return the time for the tokens [begin, end) of one row, without the kernel's start.

        Args:
            width: number of query heads times head size.
            window: number of tokens that each token attends to at most.
        """
        new = end - begin
        speed = self.flops_share * sheet.flops * new / (new + self.half_tokens)
        first, last = min(begin, window), min(end, window)
        in_window = max(end, window) - max(begin, window)
        return 2 * (last * last - first * first + 2 * in_window * window) * width / speed


class ExpertConstants(msgspec.Struct, frozen=True):
    """Constants of the expert layers."""

    bandwidth_share: float
    flops_share: float
    start_us: float

    def seconds(
        self, sheet: DataSheet, tokens: int, hidden: int, inner: int, per_token: int, experts: int
    ) -> float:
        """Return the time of `tokens` tokens, each of which uses `per_token` of `experts` experts.

        Tokens choose their experts independently, so several may choose the same one.
        """
        bandwidth = self.bandwidth_share * sheet.bandwidth
        used = experts * (1 - (1 - per_token / experts) ** tokens)
        weights = used * 3 * hidden * inner * BYTES / bandwidth
        compute = tokens * per_token * 6 * hidden * inner / (self.flops_share * sheet.flops)
        activations = tokens * per_token * 6 * (hidden + inner) * BYTES / bandwidth
        return float(max(weights, compute) + activations) + self.start_us * 1e-6


def delta_net_s(sheet: DataSheet, rows: int, tokens: int, state_bytes: int) -> float:
    """Return the time in which a delta-net reads and writes the states of rows and adds tokens.

    The shares of bandwidth and speed are assumptions: no public table has this kernel.
    """
    copying = 2 * rows * state_bytes / (0.8 * sheet.bandwidth)
    compute = tokens * 2 * state_bytes / (0.25 * sheet.flops)
    return max(copying, compute) + 15e-6


def all_reduce_s(tp: int, num_bytes: int) -> float:
    """Return the time of an all-reduce of `num_bytes` between `tp` ranks, one of TP_SIZES."""
    if tp == 1:
        return 0.0
    start, speed = _ALL_REDUCE[tp]
    return start + num_bytes / speed


_MIB = 1 << 20


class Gpu(msgspec.Struct, frozen=True):
    """A GPU: its data sheet and the constants of its kernels.

    Attributes:
        band: expected relative error of the step time of a dense model.
    """

    sheet: DataSheet
    product: MatrixProduct
    decode: DecodeAttention
    prefill: PrefillAttention
    experts: ExpertConstants
    band: float


# Fitted by `python -m tools.calibrate`. The B200's band is larger because no public measurement of
# whole steps was compared.
GPUS = {
    "h100": Gpu(
        DataSheet(3.35e12, 989e12, 81559 * _MIB),
        MatrixProduct(0.864, 0.783, 3.51, 3.85),
        DecodeAttention(0.944, 15.7, 10.8),
        PrefillAttention(0.647, 813, 8.1),
        ExpertConstants(0.92, 0.52, 31.0),
        band=0.2,
    ),
    "h200": Gpu(
        DataSheet(4.8e12, 989e12, 143771 * _MIB),
        MatrixProduct(0.849, 0.783, 3.13, 4.23),
        DecodeAttention(0.938, 15.5, 14.3),
        PrefillAttention(0.63, 766, 6.0),
        ExpertConstants(0.87, 0.49, 32.0),
        band=0.2,
    ),
    "b200": Gpu(
        DataSheet(7.7e12, 2250e12, 183359 * _MIB),
        MatrixProduct(0.822, 0.695, 2.46, 3.9),
        DecodeAttention(0.931, 9.8, 1.7),
        PrefillAttention(0.579, 804, 43.7),
        ExpertConstants(0.91, 0.36, 21.0),
        band=0.3,
    ),
}
