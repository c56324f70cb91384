"""A survey of the tensors that a decoder needs, and of their memory, without reading them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.models.blocks.source import BlockWeights
from engine.models.checkpoint import FLOATS, Checkpoint, TensorRequest
from engine.models.decoder import DecoderSpec
from engine.models.linear import (
    Form,
    Linear,
    Matrix,
    MatrixPart,
    SlottedExperts,
    common_format,
    form_of,
)
from engine.models.linear.dense import DenseLinear
from engine.models.linear.experts import StackedLinear
from engine.models.quantized.experts import ExpertLocation, ExpertShape
from engine.models.quantized.protocol import MatrixLocation, Scheme, storing, wanted_by
from engine.models.spec import LoadTarget
from engine.ranks import ExpertPart, Share
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
