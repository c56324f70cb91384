"""Reads a checkpoint's tensors for a decoder's blocks, each one once.

The operating system reads requested ranges ahead, so that the disk works while earlier matrices are
converted. That takes no memory of this process.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from common.config import Quantize
from common.logs import kv
from common.process.resources import trim
from engine.models.blocks.placed_experts import PlacedExperts
from engine.models.checkpoint import Checkpoint, OpenFiles, StoredTensor, own_copy
from engine.models.decoder import Decoder, DecoderSpec
from engine.models.linear import (
    NO_CUTS,
    Form,
    Linear,
    Matrix,
    MatrixPart,
    Product,
    Ranges,
    SlottedExperts,
    StoredExpert,
    joined,
    kept,
)
from engine.models.quantized.experts import ExpertLocation, ExpertShape
from engine.models.quantized.protocol import PLAIN, Scheme, storing
from engine.models.refill import found, refill
from engine.models.weights.survey import TensorNeeds, form_for, survey
from engine.ranks import WHOLE, ExpertPart, Share
from engine.ranks.expert_placement import LayerSlots
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
class TensorReader:
    """Reads weights from a checkpoint, see BlockWeights."""

    checkpoint: Checkpoint
    scheme: Scheme
    device: torch.device
    dtype: torch.dtype
    form: Form
    share: Share = WHOLE
    prefix: str = ""
    products: list[Product] = field(default_factory=list)

    def within(self, prefix: str) -> "TensorReader":
        return replace(self, prefix=self.prefix + prefix)

    def linear(
        self,
        rows: Mapping[str, int],
        columns: int,
        *,
        bias: bool = False,
        outputs: Mapping[str, Ranges] = NO_CUTS,
        inputs: range | None = None,
    ) -> Linear:
        parts = {
            module: MatrixPart.of(count, columns, outputs.get(module), inputs)
            for module, count in rows.items()
        }
        added = None
        if bias and self._adds_bias(inputs):
            biases = [
                kept(self._stored(f"{module}.bias"), part.outputs) for module, part in parts.items()
            ]
            added = self._own(torch.cat(biases) if len(biases) > 1 else biases[0])
        made = self.form.hold(joined([self._matrix(*each) for each in parts.items()]), added)
        modules = {self.prefix + module: part for module, part in parts.items()}
        self.products.append(Product(made, modules))
        return made

    def matrix(self, module: str, rows: int, columns: int, outputs: Ranges | None = None) -> Tensor:
        part = MatrixPart.of(rows, columns, outputs)
        return self._own(self._matrix(module, part).floats())

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

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        rows: Ranges | None = None,
    ) -> Tensor:
        return own_copy(kept(self._stored(name), rows), self.device, dtype or self.dtype)

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return own_copy(self._stored(name), self.device, torch.int64)

    def scale(self, name: str) -> float:
        stored = self.prefix + name in self.checkpoint.tensors
        return float(self._stored(name)) if stored else 1.0

    def tied(self, embedding: Tensor) -> Linear:
        return self.form.tied(embedding)

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        if not from_one:
            return self._own(self._stored(name))
        # A small difference would be lost if 1 + difference were rounded to 16 bits.
        return own_copy(self._stored(name).float() + 1, self.device, torch.float32)

    def tidy(self) -> None:
        """Return free memory to the operating system. Packing and conversion leave holes between
        the matrices that stay."""
        trim()

    def _matrix(self, module: str, part: MatrixPart) -> Matrix:
        module = self.prefix + module
        scheme = storing(self.scheme, PLAIN, module, self.checkpoint)
        return self._cut(scheme.matrix(module, part.rows, part.columns, self.checkpoint), part)

    def _cut(self, matrix: Matrix, part: MatrixPart) -> Matrix:
        return part.cut(self.form.rounded(matrix) if part.splits_inputs else matrix)

    def _adds_bias(self, inputs: range | None) -> bool:
        return inputs is None or self.share.rank == 0

    def _own(self, tensor: Tensor) -> Tensor:
        return own_copy(tensor, self.device, self.dtype)

    def _stored(self, name: str) -> Tensor:
        return self.checkpoint.read(self.prefix + name)


def load_weights(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize = "none",
    share: Share = WHOLE,
) -> Decoder:
    """Load a rank's part of the decoder onto `device`. Only one matrix at a time is in memory
    twice.

    Raises:
        ConfigError: see `stored_tensors` and `form_of`.
    """
    form = form_for(spec, device, dtype, quantize)
    needs = survey(checkpoint, spec, form, dtype, share)
    with OpenFiles() as files:
        watched = _watched(checkpoint, needs, files)
        return spec.build(TensorReader(watched, spec.stored, device, dtype, form, share))


def refill_weights(
    decoder: Decoder,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    quantize: Quantize,
    share: Share = WHOLE,
) -> None:
    """Replace the weights of a decoder. See LoadableModel. Only one part at a time is in memory
    twice."""
    form = form_for(spec, decoder.device, decoder.dtype, quantize)
    needs = survey(checkpoint, spec, form, decoder.dtype, share)
    with OpenFiles() as files:
        watched = _watched(checkpoint, needs, files)
        reader = TensorReader(watched, spec.stored, decoder.device, decoder.dtype, form, share)
        fresh = spec.parts(reader)
        for present in decoder.parts:
            refill(present, next(fresh))
            reader.products.clear()  # otherwise all weights would be in memory twice


def move_experts(
    decoder: Decoder,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    moves: Mapping[str, LayerSlots],
    quantize: Quantize,
    share: Share,
) -> None:
    """Read the experts of other slots of a rank, from the checkpoint of its current weights. See
    LoadableModel."""
    placement, dtype = share.placement, decoder.dtype
    assert placement is not None
    form = form_for(spec, decoder.device, dtype, quantize)
    with OpenFiles() as files:
        opened = checkpoint.watched(lambda name: None, files)
        reader = TensorReader(opened, spec.stored, decoder.device, dtype, form, share)
        for experts in placed_experts(decoder):
            if (after := moves.get(experts.layer)) is not None:
                before = placement.slots(experts.layer, experts.shape.count)
                experts.replace(reader, before, after)
    placement.move(moves)


def placed_experts(decoder: Decoder) -> Sequence[PlacedExperts]:
    """Return the experts of all layers of a decoder, if they are in slots."""
    return list(found(PlacedExperts, [*decoder.parts]))


def _watched(checkpoint: Checkpoint, needs: TensorNeeds, files: OpenFiles) -> Checkpoint:
    """Return the checkpoint with read-ahead. The survey lists tensors in the order in which they
    are read."""
    tensors = {name: checkpoint.tensors[name] for name in needs.stored}
    return checkpoint.watched(ReadAhead(tensors, files).reads, files)
