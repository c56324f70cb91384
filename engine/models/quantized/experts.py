"""Storage of a layer's experts in checkpoints: separate tensors, or one tensor for all.

Only experts are stored in MXFP4, as in gpt-oss: 4-bit floats (e2m1), two per byte, with a power of
two per 32 inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.fields import Fields
from engine.models.linear import Matrix, MatrixPart, StoredExpert, common_format, joined
from engine.models.quantized.protocol import MatrixLocation, Plain, Scheme, storing, wanted_by
from engine.ranks import ExpertPart
from kernels.experts.grouped_mlp import Gate
from kernels.quantised import QuantFormat

_BLOCK = 32  # inputs per block, in 16 bytes
_BIAS = 127  # bias of exponents
MXFP4 = QuantFormat("fp4", _BLOCK)


@dataclass(frozen=True, slots=True)
class Mxfp4(Plain):
    """The scheme of all modules except experts. The storage of experts is declared separately."""

    name: str = "MXFP4 experts"
    format: QuantFormat | None = MXFP4


def mxfp4(config: Fields) -> Mxfp4:
    return Mxfp4()


def are_mxfp4(module: str, checkpoint: Checkpoint) -> bool:
    return f"{module}_blocks" in checkpoint.tensors


def wanted_mxfp4(module: str, count: int, rows: int, columns: int) -> Mapping[str, TensorRequest]:
    blocks = columns // _BLOCK
    return {
        f"{module}_blocks": TensorRequest((count, rows, blocks, _BLOCK // 2), dtypes=("U8",)),
        f"{module}_scales": TensorRequest((count, rows, blocks), dtypes=("U8",)),
    }


def read_mxfp4(module: str, number: int, checkpoint: Checkpoint) -> Matrix:
    """Return the matrix [rows, columns] of one expert."""
    packed = checkpoint.read(f"{module}_blocks")[number]
    exponents = checkpoint.read(f"{module}_scales")[number].int() - _BIAS
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents).bfloat16()  # exact
    return Matrix(codes, MXFP4, scales)


_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertLocation:
    """The location of a layer's experts.

    Attributes:
        prefix: prefix of all their names, with the dot.
    """

    checkpoint: Checkpoint
    scheme: Scheme
    prefix: str


@dataclass(frozen=True, slots=True)
class ExpertShape:
    count: int
    hidden: int
    inner: int
    gate: Gate
    storage: "ExpertStorage"

    def has_whole(self, part: ExpertPart) -> bool:
        """Return whether a part consists of whole experts."""
        return len(part.inner) == self.inner

    def parts(self, inner: range) -> tuple[MatrixPart, MatrixPart]:
        """Return the parts of gate_up [2 * inner, hidden] and down [hidden, inner] of each expert
        for this range of the intermediate size."""
        up = range(self.inner + inner.start, self.inner + inner.stop)
        gate_up = MatrixPart.of(2 * self.inner, self.hidden, (inner, up))
        return gate_up, MatrixPart.of(self.hidden, self.inner, inputs=inner)


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Experts as modules n.gate, n.up and n.down of expert n, with the given names, in any
    scheme."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    biased: bool = False

    def wanted(self, shape: ExpertShape, place: ExpertLocation) -> Mapping[str, TensorRequest]:
        tensors: dict[str, TensorRequest] = {}
        for number in range(shape.count):
            for at in self._matrices(number, shape, place):
                tensors |= wanted_by(_scheme(at, place), at)
        return tensors

    def format(self, place: ExpertLocation) -> QuantFormat | None:
        """Return the format of all matrices that `read` returns. None: floats."""
        modules = (f"{place.prefix}0.{name}" for name in (self.gate, self.up, self.down))
        schemes = (storing(place.scheme, module, place.checkpoint) for module in modules)
        return common_format([scheme.format for scheme in schemes])

    def read(self, number: int, shape: ExpertShape, place: ExpertLocation) -> StoredExpert:
        gate, up, down = (
            _scheme(at, place).matrix(at) for at in self._matrices(number, shape, place)
        )
        return StoredExpert(joined([gate, up]), down)

    def _matrices(
        self, number: int, shape: ExpertShape, place: ExpertLocation
    ) -> list[MatrixLocation]:
        """Return the locations of the expert's gate, up and down."""
        inner, hidden = shape.inner, shape.hidden
        sides = {self.gate: (inner, hidden), self.up: (inner, hidden), self.down: (hidden, inner)}
        return [
            MatrixLocation(place.checkpoint, f"{place.prefix}{number}.{name}", *each)
            for name, each in sides.items()
        ]


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """One tensor of floats for all experts, with the outputs of gate before those of up. Matrices
    are [outputs, inputs], or [inputs, outputs] in published checkpoints of Qwen3-VL.

    Attributes:
        otherwise: storage of layers without such tensors.
    """

    otherwise: SeparateExperts = field(default_factory=SeparateExperts)

    @property
    def biased(self) -> bool:
        return self.otherwise.biased

    def wanted(self, shape: ExpertShape, place: ExpertLocation) -> Mapping[str, TensorRequest]:
        if not _is_stacked(place):
            return self.otherwise.wanted(shape, place)
        return {
            f"{place.prefix}{name}": TensorRequest(
                (shape.count, rows, columns), or_shapes=((shape.count, columns, rows),)
            )
            for name, (rows, columns) in _sides(shape).items()
        }

    def format(self, place: ExpertLocation) -> QuantFormat | None:
        return None if _is_stacked(place) else self.otherwise.format(place)

    def read(self, number: int, shape: ExpertShape, place: ExpertLocation) -> StoredExpert:
        if not _is_stacked(place):
            return self.otherwise.read(number, shape, place)

        def matrix(name: str, sides: tuple[int, int]) -> Matrix:
            stored = place.checkpoint.read(place.prefix + name)[number]
            return Matrix(stored if stored.shape == sides else stored.t())

        gate_up, down = (matrix(*each) for each in _sides(shape).items())
        return StoredExpert(gate_up, down)


def _sides(shape: ExpertShape) -> Mapping[str, tuple[int, int]]:
    """Return outputs and inputs of an expert's matrices."""
    return {_GATE_UP: (2 * shape.inner, shape.hidden), _DOWN: (shape.hidden, shape.inner)}


def _is_stacked(place: ExpertLocation) -> bool:
    return f"{place.prefix}{_GATE_UP}" in place.checkpoint.tensors


@dataclass(frozen=True, slots=True)
class InterleavedExperts:
    """One tensor for all experts, with the inputs first, or MXFP4 blocks. The outputs of gate and
    up alternate. Has biases."""

    biased: bool = True

    def wanted(self, shape: ExpertShape, place: ExpertLocation) -> Mapping[str, TensorRequest]:
        tensors: dict[str, TensorRequest] = {}
        for name, (rows, columns) in _sides(shape).items():
            module = place.prefix + name
            tensors[f"{module}_bias"] = TensorRequest((shape.count, rows))
            if are_mxfp4(module, place.checkpoint):
                tensors |= wanted_mxfp4(module, shape.count, rows, columns)
            else:
                tensors[module] = TensorRequest((shape.count, columns, rows))
        return tensors

    def format(self, place: ExpertLocation) -> QuantFormat | None:
        modules = (f"{place.prefix}{name}" for name in (_GATE_UP, _DOWN))
        return MXFP4 if all(are_mxfp4(each, place.checkpoint) for each in modules) else None

    def read(self, number: int, shape: ExpertShape, place: ExpertLocation) -> StoredExpert:
        def matrix(name: str) -> Matrix:
            module = place.prefix + name
            if are_mxfp4(module, place.checkpoint):
                return read_mxfp4(module, number, place.checkpoint)
            return Matrix(place.checkpoint.read(module)[number].t())

        gate_up_bias, down_bias = (
            place.checkpoint.read(f"{place.prefix}{name}_bias")[number]
            for name in (_GATE_UP, _DOWN)
        )
        both = matrix(_GATE_UP)
        gate = both.with_rows(lambda tensor: tensor[::2])
        up = both.with_rows(lambda tensor: tensor[1::2])
        gate_up_bias = gate_up_bias.view(-1, 2).t().flatten()
        return StoredExpert(joined([gate, up]), matrix(_DOWN), gate_up_bias, down_bias)


ExpertStorage: TypeAlias = SeparateExperts | StackedTensor | InterleavedExperts


def _scheme(at: MatrixLocation, place: ExpertLocation) -> Scheme:
    return storing(place.scheme, at.module, at.checkpoint)
