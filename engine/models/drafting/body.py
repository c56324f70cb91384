"""The body of a draft layer, which follows the join: a mixer and a feed-forward net, as in a
model's layers."""

from dataclasses import dataclass

from torch import Tensor

from engine.kv_cache.states import DraftState
from engine.models.blocks.norm import Norm, RmsNorm
from engine.models.blocks.protocol import (
    Ffn,
    FfnSpec,
    KeepingMixer,
    KeepingMixerSpec,
    KeptStates,
    LayerSite,
    ModelStep,
    summed,
)
from engine.ranks import Group


@dataclass(frozen=True, slots=True)
class BodySpec:
    """The body of a draft layer with the numbers that its configuration gives.

    Attributes:
        prefix: of the names of its tensors, relative to that of the layer.
    """

    mixer: KeepingMixerSpec
    ffn: FfnSpec
    norm: Norm
    prefix: str

    def keeps(self, hidden_size: int) -> DraftState:
        """Return the state that the whole layer stores."""
        return DraftState((self.mixer.keeps,), hidden_size)

    def built_norm(self, site: LayerSite, name: str) -> RmsNorm:
        """Build a norm of the body or of the layer around it. All are of the same kind."""
        return self.norm.build(site.source, name, site.hidden_size)

    def build(self, site: LayerSite) -> "Body":
        """Build the body.

        Args:
            site: within the body's prefix.
        """
        return Body(
            mixer=self.mixer.build(site),
            ffn_norm=self.built_norm(site, "post_attention_layernorm"),
            ffn=self.ffn.build(site),
            group=site.source.share.group,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    mixer: KeepingMixer
    ffn_norm: RmsNorm
    ffn: Ffn
    group: Group | None = None  # as in Layer

    def keep(self, joined: Tensor, step: ModelStep, kept: KeptStates) -> None:
        """Store KV, see DraftLayer.

        Args:
            joined: the mixer's input.
        """
        # The first token of a prompt has no token before it, so its input is zeros. No other token
        # has position 0 on all axes.
        first = (step.batch.positions == 0).view(-1, len(joined)).all(0)[:, None]
        self.mixer.keep(joined.masked_fill(first, 0), step, kept)

    def forward(self, joined: Tensor, past: Tensor, step: ModelStep, kept: KeptStates) -> Tensor:
        """Run the body.

        Args:
            past: vectors that bypass the mixer, [num_tokens, hidden].
        """
        mixed = summed(self.mixer.forward(joined, step, kept), self.group)
        normed, residual = self.ffn_norm.forward(mixed, past)
        return residual + summed(self.ffn.forward(normed, step), self.group)
