"""A survey of the tensors that a decoder needs, and of their memory, without reading them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from common.config import Quantize
from common.errors import ConfigError
from engine.models.checkpoint import Checkpoint, TensorRequest
from engine.models.decoder import DecoderSpec
from engine.models.linear import (
    NO_CUTS,
    Form,
    Linear,
    MatrixPart,
    Product,
    Ranges,
    SlottedExperts,
    common_format,
    form_of,
)
from engine.models.linear.dense import DenseLinear
from engine.models.linear.experts import StackedLinear
from engine.models.quantized.experts import ExpertLocation, ExpertShape
from engine.models.quantized.protocol import PLAIN, Scheme, storing
from engine.ranks import WHOLE, ExpertPart, Share
from kernels.experts.grouped_mlp import ExpertMatrices
from kernels.layers.by_head import HeadMatrices, packed_bytes

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
class TensorInventory:
    """A source of weights whose tensors have no storage. It records the requested tensors, which
    are whole, and counts the bytes of the parts that a rank keeps."""

    checkpoint: Checkpoint
    scheme: Scheme
    form: Form
    dtype: torch.dtype
    share: Share = WHOLE
    needs: TensorNeeds = field(default_factory=TensorNeeds)
    prefix: str = ""

    @property
    def device(self) -> torch.device:
        return _META

    @property
    def products(self) -> Sequence[Product]:
        return ()

    def within(self, prefix: str) -> "TensorInventory":
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
        total = 0
        for module, count in rows.items():
            self._note_matrix(module, count, columns)
            num_kept = MatrixPart.of(count, columns, outputs.get(module)).num_outputs
            if bias:
                biases = num_kept if inputs is None or self.share.rank == 0 else 0
                self._kept(f"{module}.bias", (count,), self.dtype, biases)
            total += num_kept
        kept_inputs = range(columns) if inputs is None else inputs
        stored = common_format([self._scheme(module).format for module in rows])
        if stored is not None:
            stored = stored.within(kept_inputs, columns)
        self.needs.num_bytes += self.form.num_bytes(total, len(kept_inputs), stored)
        return DenseLinear(_nothing((total, len(kept_inputs)), self.dtype))

    def matrix(self, module: str, rows: int, columns: int, outputs: Ranges | None = None) -> Tensor:
        self._note_matrix(module, rows, columns)
        num_kept = MatrixPart.of(rows, columns, outputs).num_outputs
        self.needs.num_bytes += num_kept * columns * self.dtype.itemsize
        return _nothing((num_kept, columns), self.dtype)

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
            ExpertMatrices(_nothing((count, 2 * size, hidden), self.dtype)),
            ExpertMatrices(_nothing((count, hidden, size), self.dtype)),
        )

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        rows: Ranges | None = None,
    ) -> Tensor:
        num_rows = None if rows is None else sum(map(len, rows))
        return self._kept(name, shape, dtype or self.dtype, num_rows)

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.needs.stored[self.prefix + name] = TensorRequest(shape, ("I64",))
        self.needs.num_bytes += math.prod(shape) * torch.int64.itemsize
        return _nothing(shape, torch.int64)

    def scale(self, name: str) -> float:
        if self.prefix + name in self.checkpoint.tensors:
            self.needs.stored[self.prefix + name] = TensorRequest((), or_shapes=((1,),))
        return 1.0

    def tied(self, embedding: Tensor) -> Linear:
        rows, columns = embedding.shape
        self.needs.num_bytes += self.form.tied_bytes(rows, columns)
        return DenseLinear(embedding)

    def norm(self, name: str, size: int, *, from_one: bool) -> Tensor:
        return self._kept(name, (size,), torch.float32 if from_one else self.dtype)

    def tidy(self) -> None:
        pass

    def _kept(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int | None = None
    ) -> Tensor:
        """Record a stored tensor of which `rows` rows are kept. None: all rows."""
        self.needs.stored[self.prefix + name] = TensorRequest(shape)
        if rows is not None:
            shape = (rows, *shape[1:])
        self.needs.num_bytes += math.prod(shape) * dtype.itemsize
        return _nothing(shape, dtype)

    def _note_matrix(self, module: str, rows: int, columns: int) -> None:
        scheme, module = self._scheme(module), self.prefix + module
        self.needs.stored.update(scheme.wanted(module, rows, columns, self.checkpoint))

    def _scheme(self, module: str) -> Scheme:
        return storing(self.scheme, PLAIN, self.prefix + module, self.checkpoint)


def _nothing(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def survey(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    form: Form,
    dtype: torch.dtype,
    share: Share = WHOLE,
) -> TensorNeeds:
    """Return the tensors that a rank's part of the decoder needs. The tensors of all stages are
    checked against `checkpoint`.

    Raises:
        ConfigError: tensors are missing or unexpected, or have wrong shapes or dtypes, or cannot be
            split between the ranks.
    """

    def needs(share: Share) -> TensorNeeds:
        source = TensorInventory(checkpoint, spec.stored, form, dtype, share)
        spec.build(source)
        return source.needs

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


def stored_tensors(checkpoint: Checkpoint, spec: DecoderSpec) -> Mapping[str, TensorRequest]:
    """Return the model's stored tensors, checked against `checkpoint`.

    Raises:
        ConfigError: tensors are missing or unexpected, or have wrong shapes or dtypes.
    """
    form = form_of(torch.device("cpu"), torch.float32, "none")
    return survey(checkpoint, spec, form, torch.float32).stored


def weight_bytes(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize = "none",
    share: Share = WHOLE,
) -> int:
    """Return the bytes that `load_weights` allocates.

    Raises:
        ConfigError: see `stored_tensors` and `form_of`.
    """
    form = form_for(spec, device, dtype, quantize)
    return survey(checkpoint, spec, form, dtype, share).num_bytes


def form_for(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype, quantize: Quantize
) -> Form:
    """Return the form of the decoder's matrices. Raise ConfigError as `form_of` does."""
    return form_of(device, dtype, quantize, spec.model.format)
