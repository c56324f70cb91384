"""What a layer for drafts does with a token and the vector before it, once they are joined: a mixer
and a feed-forward net, as in a model's layers."""

from dataclasses import dataclass

from torch import Tensor

from engine.kv_cache.states import DraftState
from engine.models.blocks.norm import Norm, RmsNorm
from engine.models.blocks.protocol import (
    Ffn,
    FfnSpec,
    KeepingMixer,
    KeepingMixerSpec,
    Kept,
    Site,
    Step,
)


@dataclass(frozen=True, slots=True)
class BodySpec:
    """
    prefix: of the names of its tensors, behind that of the layer.
    """

    mixer: KeepingMixerSpec
    ffn: FfnSpec
    norm: Norm
    prefix: str

    def keeps(self, hidden_size: int) -> DraftState:
        """Of the whole layer."""
        return DraftState(self.mixer.keeps, hidden_size)

    def built_norm(self, site: Site, name: str) -> RmsNorm:
        """One of the body's, or of what is around it: all are of a kind."""
        return self.norm.build(site.source, name, site.hidden_size)

    def build(self, site: Site) -> "Body":
        """site: within its prefix."""
        return Body(
            mixer=self.mixer.build(site),
            ffn_norm=self.built_norm(site, "post_attention_layernorm"),
            ffn=self.ffn.build(site),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    mixer: KeepingMixer
    ffn_norm: RmsNorm
    ffn: Ffn

    def keep(self, joined: Tensor, step: Step, kept: Kept) -> None:
        """See DraftLayer.

        Args:
            joined: as the mixer sees it.
        """
        # Nothing is before a text's first token: what the layer makes of zeros.
        first = (step.batch.positions == 0)[:, None]
        self.mixer.keep(joined.masked_fill(first, 0), step, kept)

    def forward(self, joined: Tensor, past: Tensor, step: Step, kept: Kept) -> Tensor:
        """past: what goes past the mixer, [num_tokens, hidden]."""
        normed, residual = self.ffn_norm.forward(self.mixer.forward(joined, step, kept), past)
        return residual + self.ffn.forward(normed, step)
