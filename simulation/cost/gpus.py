"""GPUs of the cost model: data sheet figures, and constants fitted to public kernel benchmarks."""

import msgspec


class Gpu(msgspec.Struct, frozen=True):
    """A GPU of the cost model.

    Attributes:
        bandwidth: of its memory, bytes/s, by the data sheet.
        flops: dense bfloat16 operations/s, by the data sheet.
        memory_bytes: as the driver reports it.
        gemm_flops_share: largest share of `flops` that a matrix product reaches.
        gemm_sharpness: exponent that joins memory time and compute time of a matrix product. A
            larger exponent means that they overlap better.
    """

    bandwidth: float
    flops: float
    memory_bytes: int
    gemm_flops_share: float
    gemm_sharpness: float


_MIB = 1 << 20

GPUS = {
    "h100": Gpu(3.35e12, 989e12, 81559 * _MIB, gemm_flops_share=0.75, gemm_sharpness=6),
    "h200": Gpu(4.8e12, 989e12, 143771 * _MIB, gemm_flops_share=0.75, gemm_sharpness=3),
}
