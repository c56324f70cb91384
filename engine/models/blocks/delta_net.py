"""The gated delta net of a layer: a short convolution, then a recurrent matrix per head.

The recurrent state of a request has the same size after any number of tokens.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.kv_cache.states import RecurrentState, StateCells
from engine.models.blocks.layer import KeptStates, LayerSite, ModelStep, Norm, RmsNorm
from engine.models.blocks.source import BlockWeights
from engine.models.linear import Linear, Ranges, scaled
from kernels.backends.chosen import operations
from kernels.linear_attention.causal_conv import causal_conv
from kernels.linear_attention.delta_rule import Gates
from kernels.linear_attention.gated_norm import gated_rms_norm
from kernels.linear_attention.state_cells import StateRows


class Projected(NamedTuple):
    """Gates of each token, by key head: [num_tokens, heads, any].

    Attributes:
        z: output gate.
        b: how much is learnt.
        a: how much is forgotten.
    """

    z: Tensor
    b: Tensor
    a: Tensor


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net, with the numbers of its configuration.

    Attributes:
        heads: number of key and query heads.
        value_heads: a multiple of `heads`.
        width: number of tokens in the convolution's window.
    """

    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    norm: Norm
    projection: "Projection"

    @property
    def group(self) -> int:
        """Number of value heads per key head."""
        return self.value_heads // self.heads

    @property
    def channels(self) -> int:
        """Convolution channels per key head: its q, its k and the values of its value heads."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def keeps(self) -> RecurrentState:
        matrix = (self.key_dim, self.value_dim)
        return RecurrentState(
            (
                StateCells("delta", self.value_heads, matrix, torch.float32),
                # One cell per key head, so that a split between heads never separates q, k and v.
                StateCells("conv", self.heads, (self.channels, self.width - 1)),
            )
        )

    def products(self, hidden_size: int) -> int:
        values = self.value_heads * self.value_dim
        inputs = self.heads * self.channels + values + 2 * self.value_heads
        return hidden_size * (inputs + values) + 3 * values * self.key_dim

    def build(self, site: LayerSite) -> "DeltaNetBlock":
        source, hidden = site.source.within("linear_attn."), site.hidden_size
        heads = source.share.part(self.heads, "key heads of a delta net")
        values = scaled(heads, self.group)
        own = replace(self, heads=len(heads), value_heads=len(values))
        stored = source.tensor(
            "conv1d.weight",
            (self.heads * self.channels, 1, self.width),
            rows=_by_kind(self, heads),
        )

        def by_value_head(name: str) -> Tensor:
            shape = (self.value_heads,)
            return source.tensor(name, shape, dtype=torch.float32, rows=(values,))

        return DeltaNetBlock(
            spec=own,
            projection=self.projection.build(self, source, hidden, heads),
            columns=site.shared.get(own, lambda: own.projection.columns(own).to(source.device)),
            # Convolution weights are stored by kind, independent of the projection's layout.
            convolution=stored[ByKind().columns(own).to(source.device), 0],
            a_log=by_value_head("A_log"),
            dt_bias=by_value_head("dt_bias"),
            norm=self.norm.build(source, "norm", self.value_dim),
            output=source.linear(
                {"out_proj": hidden},
                self.value_heads * self.value_dim,
                inputs=scaled(values, self.value_dim),
            ),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetBlock:
    spec: DeltaNet
    projection: Linear
    columns: Tensor  # int32 [heads, channels], places in the projection
    convolution: Tensor  # [heads, channels, width]
    a_log: Tensor  # float32 [value_heads]
    dt_bias: Tensor  # float32 [value_heads]
    norm: RmsNorm  # over one value head
    output: Linear

    def forward(self, x: Tensor, step: ModelStep, kept: KeptStates) -> Tensor:
        rows = step.shared.get("states", lambda: step.batch.states)
        x = step.product(self.projection, x)
        if step.late is not None:
            projected = x
            step.late.add(lambda rows, count: self._pass(projected[:count], rows, kept))
        gate = self.spec.projection.split(self.spec, x).z
        x = self._pass(x, rows, kept)
        x = gated_rms_norm(x, gate, self.norm.weight, self.norm.eps)
        return step.product(self.output, x)

    def _pass(self, projected: Tensor, rows: StateRows, kept: KeptStates) -> Tensor:
        """Run the convolution and the delta rule. Returns [num_tokens, value_heads, value_dim]."""
        _, b, a = self.spec.projection.split(self.spec, projected)
        cells = kept.cells
        x = causal_conv(projected, self.columns, self.convolution, cells["conv"], rows)
        gates = Gates(a, b, self.a_log, self.dt_bias)
        return operations().delta_rule(x, gates, cells["delta"], rows)


@dataclass(frozen=True, slots=True)
class ByKeyHead:
    """Layout of Qwen3-Next: for each key head its q, k, values and gates, then its b and a."""

    def build(self, spec: DeltaNet, source: BlockWeights, hidden_size: int, own: range) -> Linear:
        """Return the product for the key heads `own` and their value heads."""
        of_head = {
            "in_proj_qkvz": spec.channels + spec.group * spec.value_dim,
            "in_proj_ba": 2 * spec.group,
        }
        rows = {name: spec.heads * size for name, size in of_head.items()}
        outputs = {name: (scaled(own, size),) for name, size in of_head.items()}
        return source.linear(rows, hidden_size, outputs=outputs)

    def columns(self, spec: DeltaNet) -> Tensor:
        """Return the columns of the product that are the convolution's input: int32 [heads,
        channels]."""
        of_head = spec.channels + spec.group * spec.value_dim
        heads, channels = torch.arange(spec.heads).int(), torch.arange(spec.channels).int()
        return heads[:, None] * of_head + channels

    def split(self, spec: DeltaNet, x: Tensor) -> Projected:
        """Return the gates, which bypass the convolution."""
        past = x.shape[1] - 2 * spec.value_heads
        qkvz, ba = _by_head(x[:, :past], spec), _by_head(x[:, past:], spec)
        return Projected(qkvz[..., spec.channels :], ba[..., : spec.group], ba[..., spec.group :])


@dataclass(frozen=True, slots=True)
class ByKind:
    """Layout of Qwen3.5: q of all heads, then all k, all values, all gates, all b, all a."""

    def build(self, spec: DeltaNet, source: BlockWeights, hidden_size: int, own: range) -> Linear:
        values = spec.value_heads * spec.value_dim
        rows = {
            "in_proj_qkv": spec.heads * spec.channels,
            "in_proj_z": values,
            "in_proj_b": spec.value_heads,
            "in_proj_a": spec.value_heads,
        }
        own_values = scaled(own, spec.group)
        outputs = {
            "in_proj_qkv": _by_kind(spec, own),
            "in_proj_z": (scaled(own_values, spec.value_dim),),
            "in_proj_b": (own_values,),
            "in_proj_a": (own_values,),
        }
        return source.linear(rows, hidden_size, outputs=outputs)

    def columns(self, spec: DeltaNet) -> Tensor:
        values = spec.group * spec.value_dim
        keys, sizes = spec.heads * spec.key_dim, (spec.key_dim, spec.key_dim, values)
        heads = torch.arange(spec.heads)[:, None]
        parts = [
            first + heads * size + torch.arange(size)
            for first, size in zip((0, keys, 2 * keys), sizes, strict=True)
        ]
        return torch.cat(parts, dim=1).int()

    def split(self, spec: DeltaNet, x: Tensor) -> Projected:
        values, value_heads = spec.value_heads * spec.value_dim, spec.value_heads
        ends = itertools.accumulate((spec.heads * spec.channels, values, value_heads, value_heads))
        z, b, a = (_by_head(x[:, start:end], spec) for start, end in itertools.pairwise(ends))
        return Projected(z, b, a)


# The layout in which a checkpoint stores the input projection.
Projection: TypeAlias = ByKeyHead | ByKind


def _by_kind(spec: DeltaNet, own: range) -> Ranges:
    """Return the channels of these key heads if those of all heads are stored by kind: q, k,
    values."""
    keys = spec.heads * spec.key_dim
    q, values = scaled(own, spec.key_dim), scaled(own, spec.group * spec.value_dim)
    k = range(keys + q.start, keys + q.stop)
    return q, k, range(2 * keys + values.start, 2 * keys + values.stop)


def _by_head(x: Tensor, spec: DeltaNet) -> Tensor:
    return x.view(len(x), spec.heads, x.shape[1] // spec.heads)
