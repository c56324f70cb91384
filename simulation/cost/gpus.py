"""The GPUs of the cost model."""

import msgspec

from simulation.cost.kernels import (
    DataSheet,
    DecodeAttention,
    Experts,
    MatrixProduct,
    PrefillAttention,
)

_MIB = 1 << 20


class Gpu(msgspec.Struct, frozen=True):
    """A GPU: its data sheet, and the constants of its kernels.

    Attributes:
        band: relative error to expect of the time of a step of a dense model.
    """

    sheet: DataSheet
    product: MatrixProduct
    decode: DecodeAttention
    prefill: PrefillAttention
    experts: Experts
    band: float


# Fitted by `python -m tools.calibrate`. The larger band of the B200: no public measurement of whole
# steps was compared.
GPUS = {
    "h100": Gpu(
        DataSheet(3.35e12, 989e12, 81559 * _MIB),
        MatrixProduct(0.864, 0.783, 3.51, 3.85),
        DecodeAttention(0.944, 15.7, 10.8),
        PrefillAttention(0.647, 813, 8.1),
        Experts(0.92, 0.52, 31.0),
        band=0.2,
    ),
    "h200": Gpu(
        DataSheet(4.8e12, 989e12, 143771 * _MIB),
        MatrixProduct(0.849, 0.783, 3.13, 4.23),
        DecodeAttention(0.938, 15.5, 14.3),
        PrefillAttention(0.63, 766, 6.0),
        Experts(0.87, 0.49, 32.0),
        band=0.2,
    ),
    "b200": Gpu(
        DataSheet(7.7e12, 2250e12, 183359 * _MIB),
        MatrixProduct(0.822, 0.695, 2.46, 3.9),
        DecodeAttention(0.931, 9.8, 1.7),
        PrefillAttention(0.579, 804, 43.7),
        Experts(0.91, 0.36, 21.0),
        band=0.3,
    ),
}
