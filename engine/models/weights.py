"""The weights of a decoder in the files of a directory.

A survey lists the tensors that a decoder needs, and their memory, without reading them. A reader
reads each one once. The operating system reads requested ranges ahead, so that the disk works while
earlier matrices are converted. That takes no memory of this process.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from common.logs import kv
from common.process.resources import trim
from engine.models.blocks.placed_experts import PlacedExperts
from engine.models.blocks.source import BlockWeights
from engine.models.checkpoint import FLOATS, Checkpoint, OpenFiles, StoredTensor, TensorRequest
from engine.models.decoder import Decoder, DecoderSpec
from engine.models.linear import (
    Form,
    Linear,
    Matrix,
    MatrixPart,
    Ranges,
    SlottedExperts,
    StoredExpert,
    common_format,
    form_of,
    joined,
    kept,
)
from engine.models.linear.dense import DenseLinear, StackedLinear
from engine.models.quantized.experts import ExpertLocation, ExpertShape
from engine.models.quantized.protocol import MatrixLocation, Scheme, storing, wanted_by
from engine.models.refill import found, refill
from engine.models.spec import LoadTarget
from engine.ranks import ExpertPart, Share
from engine.ranks.expert_placement import LayerSlots
from kernels.experts.grouped_mlp import ExpertMatrices
from kernels.layers.by_head import HeadMatrices, packed_bytes

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


# Old Llama checkpoints store the inverse frequencies, which can be computed from the configuration.
_IGNORED = frozenset({".rotary_emb.inv_freq"})
_META = torch.device("meta")


@dataclass(slots=True)
class TensorNeeds:
    """The tensors that a decoder needs.

    Attributes:
        stored: by name.
        num_bytes: memory of the converted tensors.
        has_experts: whether a layer is a mixture of experts.
    """

    stored: dict[str, TensorRequest] = field(default_factory=dict)
    num_bytes: int = 0
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class TensorInventory(BlockWeights):
    """A source of weights whose tensors have no storage. It records the requested tensors, which
    are whole, and counts the bytes of the parts that a rank keeps."""

    checkpoint: Checkpoint
    scheme: Scheme
    form: Form
    needs: TensorNeeds = field(default_factory=TensorNeeds)

    @property
    def device(self) -> torch.device:
        return _META

    def by_head(self, weights: Tensor) -> HeadMatrices:
        self.needs.num_bytes += packed_bytes(weights)
        return HeadMatrices(weights)

    def experts(self, shape: ExpertShape, part: ExpertPart) -> SlottedExperts:
        place = ExpertLocation(self.checkpoint, self.scheme, f"{self.prefix}experts.")
        self.needs.stored.update(shape.storage.wanted(shape, place))
        self.needs.has_experts = True
        count, hidden, size = len(part.experts), shape.hidden, len(part.inner)
        stored = shape.storage.format(place)
        cut = None if stored is None else stored.within(part.inner, shape.inner)
        one = self.form.num_bytes(2 * size, hidden, stored)
        one += self.form.num_bytes(hidden, size, cut)
        if shape.storage.biased:
            down = hidden if self.share.rank == 0 or shape.has_whole(part) else 0
            one += (2 * size + down) * self.dtype.itemsize
        self.needs.num_bytes += count * one
        return StackedLinear(
            shape.gate,
            ExpertMatrices(self._nothing((count, 2 * size, hidden))),
            ExpertMatrices(self._nothing((count, hidden, size))),
        )

    def scale(self, name: str) -> float:
        if self.prefix + name in self.checkpoint.tensors:
            self.needs.stored[self.prefix + name] = TensorRequest((), or_shapes=((1,),))
        return 1.0

    def tied(self, embedding: Tensor) -> Linear:
        self.needs.num_bytes += self.form.tied_bytes(*embedding.shape)
        return DenseLinear(embedding)

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        return self.tensor(name, (size,), dtype=torch.float32 if from_one else None)

    def tidy(self) -> None:
        """Do nothing, because nothing was allocated."""

    def _stored(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        self.needs.stored[name] = TensorRequest(shape, dtypes)
        return self._nothing(shape)

    def _matrix(self, module: str, part: MatrixPart) -> Matrix:
        at = MatrixLocation(self.checkpoint, module, part.rows, part.columns)
        self.needs.stored.update(wanted_by(self._scheme(module), at))
        return Matrix(self._nothing((part.num_outputs, len(part.inputs))))

    def _product(self, parts: Mapping[str, MatrixPart], biases: Sequence[Tensor]) -> Linear:
        # Concatenation on the meta device would import a part of torch of 70 MiB.
        outputs = sum(len(self._matrix(*each).numbers) for each in parts.items())
        first = next(iter(parts.values()))
        stored = common_format([self._scheme(module).format for module in parts])
        if stored is not None:
            stored = stored.within(first.inputs, first.columns)
        self.needs.num_bytes += self.form.num_bytes(outputs, len(first.inputs), stored)
        for bias in biases:
            self._own(bias)
        return DenseLinear(self._nothing((outputs, len(first.inputs))))

    def _own(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        own = tensor.to(dtype or self.dtype)
        self.needs.num_bytes += own.nbytes
        return own

    def _scheme(self, module: str) -> Scheme:
        return storing(self.scheme, module, self.checkpoint)

    def _nothing(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=_META)


def survey(checkpoint: Checkpoint, spec: DecoderSpec, target: LoadTarget) -> TensorNeeds:
    """Return the tensors that a rank's part of the decoder needs. The tensors of all stages are
    checked against `checkpoint`.

    Raises:
        ConfigError: tensors are missing or unexpected, or have wrong shapes or dtypes, or cannot be
            split between the ranks.
    """

    def needs(share: Share) -> TensorNeeds:
        part = replace(target, share=share)
        source = TensorInventory(part, checkpoint, spec.stored, form)
        spec.build(source)
        return source.needs

    form, share = form_of(target, spec.model.format), target.share
    part = needs(share)
    whole = part if share.stage is None else needs(replace(share, stage=None))
    ignored = _IGNORED | spec.stored.ignored
    if spec.tied_embeddings:
        ignored |= {"lm_head.weight"}
    checkpoint.check(whole.stored, ignored, spec.unused)
    if not whole.has_experts and (share.whole_experts or share.exchange is not None):
        setting = "experts" if share.whole_experts else "dp"
        raise ConfigError(f"engine.parallel.{setting}: the model has no experts")
    return part


@dataclass(frozen=True, slots=True)
class StoredDecoder:
    """A decoder in a directory. Each call opens the checkpoint, whose files may have changed.

    All methods raise ConfigError if there is no checkpoint, or if tensors are missing, unexpected,
    of wrong shapes or dtypes, or cannot be split between the ranks. Also see `form_of`.
    """

    directory: Path
    spec: DecoderSpec

    def stored(self) -> Mapping[str, TensorRequest]:
        anywhere = LoadTarget(torch.device("cpu"), torch.float32)
        return survey(Checkpoint(self.directory), self.spec, anywhere).stored

    def weight_bytes(self, target: LoadTarget) -> int:
        return survey(Checkpoint(self.directory), self.spec, target).num_bytes

    def load(self, target: LoadTarget) -> Decoder:
        """Load a rank's part. Only one matrix at a time is in memory twice."""
        with self._reader(target) as reader:
            return self.spec.build(reader)

    def refill(self, decoder: Decoder) -> None:
        """Replace the weights. See LoadableModel. Only one part at a time is in memory twice."""
        with self._reader(decoder.target) as reader:
            fresh = self.spec.parts(reader)
            for present in decoder.parts:
                refill(present, next(fresh))
                reader.products.clear()  # otherwise all weights would be in memory twice

    def move_experts(self, decoder: Decoder, moves: Mapping[str, LayerSlots]) -> None:
        """Read the experts of other slots of a rank, from the checkpoint of its current weights.
        See LoadableModel."""
        placement = decoder.target.share.placement
        assert placement is not None
        with self._reader(decoder.target, ahead=False) as reader:
            for experts in placed_experts(decoder):
                if (after := moves.get(experts.layer)) is not None:
                    before = placement.slots(experts.layer, experts.shape.count)
                    experts.replace(reader, before, after)
        placement.move(moves)

    @contextmanager
    def _reader(self, target: LoadTarget, *, ahead: bool = True) -> Iterator[TensorReader]:
        """Yield a reader of a rank's part. `ahead`: check all tensors, and read them ahead."""
        checkpoint, form = Checkpoint(self.directory), form_of(target, self.spec.model.format)
        with OpenFiles() as files:
            reads = None
            if ahead:
                # The survey lists tensors in the order in which they are read.
                needs = survey(checkpoint, self.spec, target)
                tensors = {name: checkpoint.tensors[name] for name in needs.stored}
                reads = ReadAhead(tensors, files).reads
            yield TensorReader(target, checkpoint.watched(reads, files), self.spec.stored, form)


def placed_experts(decoder: Decoder) -> Sequence[PlacedExperts]:
    """Return the experts of all layers of a decoder, if they are in slots."""
    return list(found(PlacedExperts, [*decoder.parts]))
