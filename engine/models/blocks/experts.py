"""Feed-forward nets: gated ones, down(act(gate) * up), and mixtures of experts (MoE).

The router of a mixture selects a few experts for each token. A shared expert for all tokens is
optional.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.models.blocks.layer import LayerSite, ModelStep
from engine.models.blocks.placed_experts import PlacedExperts
from engine.models.blocks.source import BlockWeights
from engine.models.linear import ExpertNet, Linear
from engine.models.quantized.experts import ExpertShape, ExpertStorage, SeparateExperts
from engine.ranks.expert_exchange import ExpertExchange
from kernels.experts.grouped_mlp import Gate
from kernels.experts.routing import Routing, route
from kernels.experts.shared_expert import add_gated
from kernels.layers.act_and_mul import Activation, act_and_mul
from kernels.layers.linear import linear


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated feed-forward net.

    Attributes:
        module: name of the net in the checkpoint.
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
        """Do nothing, because each node of a group has the whole net."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, with the numbers of its configuration.

    Attributes:
        exact_router: whether router logits are computed in float32.
        choice_bias: whether a stored bias is added to the scores by which experts are chosen.
        shared: expert for all tokens.
        shared_gate: whether a gate per token scales the shared expert's output.
        module, router, storage: names in the checkpoint, and how it stores the experts.
        router_bias: whether a bias is added to router logits.
    """

    count: int
    intermediate_size: int
    gate: Gate
    routing: Routing
    exact_router: bool = False
    choice_bias: bool = False
    shared: DenseMlp | None = None
    shared_gate: bool = False
    module: str = "mlp"
    router: str = "gate"
    router_bias: bool = False
    storage: ExpertStorage = field(default_factory=SeparateExperts)

    def products(self, hidden_size: int) -> int:
        chosen = self.routing.k * 3 * hidden_size * self.intermediate_size
        shared = 0 if self.shared is None else self.shared.products(hidden_size)
        return (self.count + self.shared_gate) * hidden_size + chosen + shared

    def build(self, site: LayerSite) -> "ExpertsBlock":
        source, hidden = site.source.within(f"{self.module}."), site.hidden_size
        shape = ExpertShape(self.count, hidden, self.intermediate_size, self.gate, self.storage)
        bias, choice_bias, gate = None, None, None
        exact = torch.float32 if self.exact_router else None
        if self.router_bias:
            bias = source.tensor(f"{self.router}.bias", (self.count,), dtype=exact)
        if self.choice_bias:
            name = f"{self.router}.e_score_correction_bias"
            choice_bias = source.tensor(name, (self.count,), dtype=torch.float32)
        if self.shared_gate:
            gate = source.tensor("shared_expert_gate.weight", (1, hidden))
        return ExpertsBlock(
            routing=self.routing,
            router=source.tensor(f"{self.router}.weight", (self.count, hidden), dtype=exact),
            router_bias=bias,
            choice_bias=choice_bias,
            experts=_part_of(source, shape),
            shared=None if self.shared is None else self.shared.build(site),
            shared_gate=gate,
        )


def _part_of(source: BlockWeights, shape: ExpertShape) -> ExpertNet:
    exchange, placement = source.share.exchange, source.share.placement
    if placement is not None:
        return PlacedExperts.of(source, shape, placement)
    part = source.share.expert_part(shape.count, shape.inner)
    net = source.experts(shape, part)
    own = net if len(part.experts) == shape.count else OwnExperts(net, part.experts)
    return own if exchange is None else SharedExperts(own, exchange)


@dataclass(frozen=True, slots=True, eq=False)
class OwnExperts:
    """Some of a layer's experts. The sum over the ranks adds the results of the others.

    Attributes:
        numbers: consecutive numbers of these experts.
    """

    net: ExpertNet
    numbers: Sequence[int]

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        first, none = self.numbers[0], len(self.numbers)
        own = (ids >= first) & (ids < first + none)
        # The number `none` marks pairs of another rank, see grouped_mlp.
        places = torch.where(own, ids - first, none)
        return self.net.apply(x, weights * own, places)


@dataclass(frozen=True, slots=True, eq=False)
class SharedExperts:
    """The experts of a layer that the nodes of a data-parallel group share. Every node computes its
    own experts for the tokens of all nodes."""

    own: ExpertNet
    exchange: ExpertExchange

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.exchange.own_sum(self.own.apply(*self.exchange.gather(x, weights, ids)))


class RoutedExperts:
    """The experts of each token of the newest forward. Forward stream only.

    All forwards write to the same addresses, so that graphs can contain the copies.

    Args:
        num_tokens: tokens of the largest forward.
        num_layers: number of layers of the model, including those of another pipeline stage.
        k: maximum experts per token in any layer.

    Attributes:
        token_bytes: bytes per token.
    """

    def __init__(self, num_tokens: int, num_layers: int, k: int, device: torch.device) -> None:
        self._ids = torch.zeros(num_tokens, num_layers, k, dtype=torch.int16, device=device)
        self.token_bytes = self._ids.element_size() * num_layers * k

    def write(self, layer: int, ids: Tensor) -> None:
        """Copy the experts of a layer, int32 [n, k], for the forward's tokens."""
        self._ids[: len(ids), layer, : ids.shape[1]] = ids

    def of(self, tokens: Tensor) -> Tensor:
        """Return the experts of some tokens of the forward: int16 [n, layers, k]. Layers without
        experts or in another stage have zeros."""
        return self._ids[tokens]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedExperts:
    """The experts of a layer, which also records the experts of each token."""

    net: ExpertNet
    layer: int
    routed: RoutedExperts

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        self.routed.write(self.layer, ids)
        return self.net.apply(x, weights, ids)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsBlock:
    routing: Routing
    # [experts, hidden]: never quantised, because small errors would change the choice.
    router: Tensor
    router_bias: Tensor | None  # [experts], in the router's dtype
    choice_bias: Tensor | None  # float32 [experts]
    experts: ExpertNet
    shared: DenseBlock | None
    shared_gate: Tensor | None  # [1, hidden]

    def forward(self, x: Tensor, step: ModelStep) -> Tensor:
        logits = linear(x.to(self.router.dtype), self.router, self.router_bias)
        weights, ids = route(logits, self.routing, self.choice_bias)
        y = self.experts.apply(x, weights, ids)
        if self.shared is None:
            return y
        shared = self.shared.forward(x, step)
        if self.shared_gate is None:
            return y + shared
        return add_gated(y, shared, x, self.shared_gate)

    def take_part(self, x: Tensor) -> None:
        weights = torch.empty(0, self.routing.k, device=x.device)
        self.experts.apply(x, weights, weights.int())
