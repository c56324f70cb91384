"""8-bit floats with a scale per block, per row, or for the whole matrix.

Formats: `fp8` of DeepSeek, Qwen and vLLM's quantisers, `fbgemm_fp8` of Meta, and inside
`compressed-tensors`. Scales of activations are ignored, because inputs are not rounded here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.models.checkpoint import FLOATS, TensorRequest
from engine.models.fields import Fields
from engine.models.linear import Matrix
from engine.models.quantized.protocol import MatrixLocation, Scheme
from kernels.quantised import QuantFormat


@dataclass(frozen=True, slots=True)
class Fp8(Scheme):
    """8-bit floats with scales.

    Attributes:
        block: rows and columns per scale. None: one scale per row or for the whole matrix.
    """

    block: tuple[int, int] | None
    ignored = frozenset({".input_scale", ".k_scale", ".v_scale", ".activation_scale"})

    @property
    def name(self) -> str:
        return "fp8" if self.block is None else f"fp8 in blocks of {self.block[0]}x{self.block[1]}"

    @property
    def format(self) -> QuantFormat:
        return QuantFormat("fp8", 0 if self.block is None else self.block[1])

    def wanted(self, at: MatrixLocation) -> Mapping[str, TensorRequest]:
        rows, columns = at.rows, at.columns
        if self.block is None:
            shapes: tuple[tuple[int, ...], ...] = ((rows, 1), (rows,), (1,), ())
        else:
            shapes = ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        return {
            "weight": TensorRequest((rows, columns), dtypes=("F8_E4M3",)),
            _scale(at): TensorRequest(shapes[0], FLOATS, shapes[1:]),
        }

    def matrix(self, at: MatrixLocation) -> Matrix:
        scales = at.read(_scale(at)).float()
        if self.block is None:
            scales = scales.reshape(-1, 1).expand(at.rows, 1).contiguous()
        else:
            scales = scales.repeat_interleave(self.block[0], 0)[: at.rows]
        return Matrix(at.read("weight"), self.format, scales)


def _scale(at: MatrixLocation) -> str:
    inverse = "weight_scale_inv"  # the multiplier, despite its name
    return inverse if at.has(inverse) else "weight_scale"


def fp8(config: Fields) -> Fp8:
    return Fp8(
        block_of(config, "weight_block_size") if config.counts("weight_block_size") else None
    )


def fbgemm_fp8(config: Fields) -> Fp8:
    return Fp8(None)


def block_of(config: Fields, name: str) -> tuple[int, int]:
    """Return a field with rows and columns per scale."""
    sizes = config.counts(name)
    if len(sizes) != 2 or 0 in sizes:
        raise config.wrong(name, "two positive integers")
    return sizes[0], sizes[1]
