"""Reads a checkpoint's tensors for a decoder's blocks, each one once.

The operating system reads requested ranges ahead, so that the disk works while earlier matrices are
converted. That takes no memory of this process.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.logs import kv
from common.process.resources import trim
from engine.models.blocks.source import BlockWeights
from engine.models.checkpoint import FLOATS, Checkpoint, OpenFiles, StoredTensor
from engine.models.linear import (
    Form,
    Linear,
    Matrix,
    MatrixPart,
    Ranges,
    SlottedExperts,
    StoredExpert,
    joined,
    kept,
)
from engine.models.quantized.experts import ExpertLocation, ExpertShape
from engine.models.quantized.protocol import MatrixLocation, Scheme, storing
from engine.ranks import ExpertPart
from kernels.layers.by_head import HeadMatrices

AHEAD_BYTES = 512 << 20
LOG_INTERVAL_S = 10.0

log = logging.getLogger(__name__)


class ReadAhead:
    """The read-ahead of a checkpoint while a model is loaded.

    Args:
        tensors: by name, in the approximate order in which they will be read.
        files: keeps the shards open.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        files: OpenFiles,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left = {name: tensor.num_bytes for name, tensor in tensors.items()}
        self._total = sum(self._left.values())
        self._read = 0
        self._files = files
        self._coming = iter(tensors.values())
        self._asked = 0  # bytes
        self._clock = clock
        self._logged_at = clock()

    def reads(self, name: str) -> None:
        """Record that a tensor is read now. Repeated calls for a tensor have no effect."""
        self._read += self._left.pop(name, 0)
        while self._asked < self._read + AHEAD_BYTES:
            tensor = next(self._coming, None)
            if tensor is None:
                break
            with contextlib.suppress(OSError):  # a file system without support for hints
                self._files.ask_for(tensor.path, tensor.offset, tensor.num_bytes)
            self._asked += tensor.num_bytes
        if self._clock() >= self._logged_at + LOG_INTERVAL_S:
            self._logged_at = self._clock()
            share = f"{100 * self._read // self._total} %"
            log.info("weights %s", kv(read=share, mib=self._read >> 20, of_mib=self._total >> 20))


@dataclass(frozen=True, slots=True)
class TensorReader(BlockWeights):
    """Reads weights from a checkpoint."""

    checkpoint: Checkpoint
    scheme: Scheme
    form: Form

    def by_head(self, weights: Tensor) -> HeadMatrices:
        return HeadMatrices.of(weights)

    def experts(self, shape: ExpertShape, part: ExpertPart) -> SlottedExperts:
        place = ExpertLocation(self.checkpoint, self.scheme, f"{self.prefix}experts.")
        gate_up, down = shape.parts(part.inner)
        adds_bias = self._adds_bias(None if shape.has_whole(part) else part.inner)

        def owned(bias: Tensor | None, outputs: Ranges) -> Tensor | None:
            return None if bias is None else self._own(kept(bias, outputs))

        def stored() -> Iterator[StoredExpert]:
            for number in part.experts:
                one = shape.storage.read(number, shape, place)
                down_bias = one.down_bias if adds_bias else None
                yield StoredExpert(
                    self._cut(one.gate_up, gate_up),
                    self._cut(one.down, down),
                    owned(one.gate_up_bias, gate_up.outputs),
                    owned(down_bias, down.outputs),
                )

        return self.form.experts(stored(), len(part.experts), shape.gate)

    def scale(self, name: str) -> float:
        stored = self.prefix + name in self.checkpoint.tensors
        return float(self.checkpoint.read(self.prefix + name)) if stored else 1.0

    def tied(self, embedding: Tensor) -> Linear:
        return self.form.tied(embedding)

    def tidy(self) -> None:
        """Return free memory to the operating system. Packing and conversion leave holes between
        the matrices that stay."""
        trim()

    def _stored(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        return self.checkpoint.read(name)

    def _matrix(self, module: str, part: MatrixPart) -> Matrix:
        scheme = storing(self.scheme, module, self.checkpoint)
        at = MatrixLocation(self.checkpoint, module, part.rows, part.columns)
        return self._cut(scheme.matrix(at), part)

    def _product(self, parts: Mapping[str, MatrixPart], biases: Sequence[Tensor]) -> Linear:
        bias = self._own(torch.cat([*biases])) if biases else None
        return self.form.hold(joined([self._matrix(*each) for each in parts.items()]), bias)

    def _cut(self, matrix: Matrix, part: MatrixPart) -> Matrix:
        return part.cut(self.form.rounded(matrix) if part.splits_inputs else matrix)
