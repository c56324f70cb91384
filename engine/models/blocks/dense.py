"""The gated feed-forward net for every token: down(act(gate) * up)."""

from dataclasses import dataclass

from torch import Tensor

from engine.models.blocks.protocol import LayerSite, ModelStep
from engine.models.linear import Linear
from kernels.layers.act_and_mul import Activation, act_and_mul


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated feed-forward net.

    Attributes:
        module: its name in the checkpoint.
    """

    intermediate_size: int
    activation: Activation
    bias: bool = False
    module: str = "mlp"

    def products(self, hidden_size: int) -> int:
        return 3 * hidden_size * self.intermediate_size

    def build(self, site: LayerSite) -> "DenseBlock":
        source, inner = site.source.within(f"{self.module}."), self.intermediate_size
        own = source.share.part(inner, f"inner numbers of {self.module}")
        gates, kept = ("gate_proj", "up_proj"), (own,)
        return DenseBlock(
            activation=self.activation,
            gate_up=source.linear(
                dict.fromkeys(gates, inner),
                site.hidden_size,
                bias=self.bias,
                outputs=dict.fromkeys(gates, kept),
            ),
            down=source.linear({"down_proj": site.hidden_size}, inner, bias=self.bias, inputs=own),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DenseBlock:
    activation: Activation
    gate_up: Linear  # hidden -> 2 * intermediate: gate, up
    down: Linear

    def forward(self, x: Tensor, step: ModelStep) -> Tensor:
        inner = act_and_mul(step.product(self.gate_up, x), self.activation)
        return step.product(self.down, inner)

    def take_part(self, x: Tensor) -> None:
        """Do nothing: each node of a group has the whole net."""
