"""A decoder layer: a mixer and a feed-forward net, each after an RMSNorm and added to its input."""

from dataclasses import dataclass

from torch import Tensor

from engine.models.blocks.protocol import (
    Ffn,
    FfnSpec,
    KeptStates,
    LayerSite,
    Mixer,
    MixerSpec,
    ModelStep,
    summed,
)
from engine.models.blocks.source import BlockWeights
from engine.ranks import Group
from kernels.cpu.layers import NormWeight
from kernels.layers.rms_norm import add_rms_norm


@dataclass(frozen=True, slots=True)
class Norm:
    """The numbers of an RMSNorm.

    Attributes:
        from_one: whether the stored weight is the difference from 1.
    """

    eps: float
    from_one: bool = False

    def build(self, source: BlockWeights, name: str, size: int) -> "RmsNorm":
        return RmsNorm(source.norm(f"{name}.weight", size, from_one=self.from_one), self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm(NormWeight):
    """An RMSNorm. The multiplier is float32 if the stored weight is the difference from 1."""

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual), see `add_rms_norm`."""
        return add_rms_norm(x, residual, self.weight, self.eps, rows=rows)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The numbers of one layer.

    Attributes:
        post_norms: whether the outputs of mixer and net have a norm, too, before they are added.
    """

    mixer: MixerSpec
    ffn: FfnSpec
    norm: Norm
    post_norms: bool = False

    def products(self, hidden_size: int) -> int:
        return self.mixer.products(hidden_size) + self.ffn.products(hidden_size)

    def build(self, site: LayerSite) -> "Layer":
        def norm(name: str) -> RmsNorm:
            return self.norm.build(site.source, name, site.hidden_size)

        # With four norms, this name denotes the norm after the mixer.
        after = "post_attention_layernorm"
        layer = Layer(
            mixer_norm=norm("input_layernorm"),
            mixer=self.mixer.build(site),
            mixer_post_norm=norm(after) if self.post_norms else None,
            ffn_norm=norm("pre_feedforward_layernorm" if self.post_norms else after),
            ffn=self.ffn.build(site),
            ffn_post_norm=norm("post_feedforward_layernorm") if self.post_norms else None,
            group=site.source.share.group,
        )
        site.source.tidy()
        return layer


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    mixer_norm: RmsNorm
    mixer: Mixer
    mixer_post_norm: RmsNorm | None
    ffn_norm: RmsNorm
    ffn: Ffn
    ffn_post_norm: RmsNorm | None
    group: Group | None = None  # ranks over which the outputs of mixer and net are summed

    def forward(
        self, x: Tensor, residual: Tensor | None, step: ModelStep, kept: KeptStates
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            x: output of the previous layer, not yet added to `residual`.
            residual: the sum so far. None in the first layer.
        Returns:
            x and residual for the next layer.
        """
        x, residual = self.mixer_norm.forward(x, residual)
        x = summed(self.mixer.forward(x, step, kept), self.group)
        x = normed(x, self.mixer_post_norm)
        x, residual = self.ffn_norm.forward(x, residual)
        x = summed(self.ffn.forward(x, step), self.group)
        return normed(x, self.ffn_post_norm), residual


def normed(x: Tensor, norm: RmsNorm | None) -> Tensor:
    """Return x after a norm. None: x itself."""
    return x if norm is None else norm.forward(x)[0]
