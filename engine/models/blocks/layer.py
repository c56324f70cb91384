"""A decoder layer: a mixer and a feed-forward net, each after an RMSNorm and added to its input.

The protocols define how these blocks are built, and how they run in a forward.
A spec has the numbers of a configuration, and builds the block that computes with them.

A recurrent state cannot be rolled back. The forward that verifies drafts therefore writes no state
for rows with drafts. Each layer keeps the row's inputs to the recurrence, and runs the recurrence
again over the accepted tokens after verification. This is a small part of a forward, and needs some
numbers per token until the step ends. The alternative, one state after each draft, would need as
many states as there are drafts.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from engine.batch.forward import ForwardBatch
from engine.kv_cache.states import LayerState
from engine.models.blocks.source import BlockWeights
from engine.models.linear import Linear
from engine.models.vision.seeing import ImageFeatures
from engine.ranks import Group
from kernels.cpu.layers import NormWeight
from kernels.layers.rms_norm import add_rms_norm
from kernels.linear_attention.state_cells import CellView, StateRows


class LateStates:
    """The deferred state updates of one step. Forward stream only.

    Attributes:
        guessed: whether the device has drawn the drafts of the step, so that a draft model has
            their KV.
    """

    def __init__(self, *, guessed: bool = False) -> None:
        self.guessed = guessed
        self._layers: list[Callable[[StateRows, int], object]] = []
        self._drafters: list[Callable[[Tensor], object]] = []

    def add(self, write: Callable[[StateRows, int], object]) -> None:
        """Add a layer's state update for the step's first tokens, which include all rows with
        drafts.

        Args:
            write: updates the states as specified by its StateRows argument. Its second argument is
                the number of these tokens.
        """
        self._layers.append(write)

    def add_drafter(self, store: Callable[[Tensor], object]) -> None:
        """Add an update of a drafter's state.

        Args:
            store: stores the state from which the rows continue. Its argument is int64 [num_rows],
                places of the rows' last accepted tokens in the step.
        """
        self._drafters.append(store)

    @property
    def has_layers(self) -> bool:
        """Return whether `write` has any effect."""
        return bool(self._layers)

    @property
    def has_drafters(self) -> bool:
        """Return whether `continue_from` has any effect."""
        return bool(self._drafters)

    @property
    def has_updates(self) -> bool:
        return self.has_layers or self.has_drafters

    def write(self, rows: StateRows, num_tokens: int) -> None:
        """Run the state updates of all layers once, after verification.

        Args:
            rows: see ForwardBatch.states_after.
        """
        for write in self._layers:
            write(rows, num_tokens)

    def continue_from(self, places: Tensor) -> None:
        """Run the updates of drafters once, after verification.

        Args:
            places: see `add_drafter`.
        """
        for store in self._drafters:
            store(places)


T = TypeVar("T")


class SharedStepState:
    """Objects that several blocks share. The first block that needs an object creates it."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made


@dataclass(frozen=True, slots=True)
class LayerSite:
    """The context in which a block is built.

    Attributes:
        shared: objects shared by all blocks of the model.
    """

    source: BlockWeights
    hidden_size: int
    shared: SharedStepState = field(default_factory=SharedStepState)

    def within(self, prefix: str) -> "LayerSite":
        return replace(self, source=self.source.within(prefix))


class AdaptedLinear(Protocol):
    """The contribution of LoRA adapters to products with the model's matrices."""

    def add(self, product: Linear, x: Tensor, y: Tensor) -> None:
        """Add the adapters' contribution to a product. If no adapter changes `product`, y is
        unchanged.

        Args:
            product: the model's own matrix.
            x: [num_tokens, in], the input of the product.
            y: contiguous [num_tokens, out], modified in place.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ModelStep:
    """One forward, as blocks see it.

    Attributes:
        adapted: None if no row has an adapter.
        late: collects the layers' state updates if rows have drafts. Otherwise None.
        features: features of visible images, for models that add them.
        taps: numbers of the layers whose inputs a drafter reads.
        tapped: these inputs, [num_tokens, hidden] each.
    """

    batch: ForwardBatch
    adapted: AdaptedLinear | None = None
    late: LateStates | None = None
    features: Sequence[ImageFeatures] = ()
    taps: Sequence[int] = ()
    tapped: dict[int, Tensor] = field(default_factory=dict)
    shared: SharedStepState = field(default_factory=SharedStepState)

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """Return linear.apply(x), plus the contribution of adapters."""
        y = linear.apply(x)
        if self.adapted is not None:
            self.adapted.add(linear, x, y)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class KeptStates:
    """The memory of a layer's KV and states.

    Attributes:
        view: the layer's view of the pool (KVLayout.view).
        table: page table of the layer's pages.
        cells: the layer's state cells, by name.
    """

    view: Tensor
    table: int
    cells: Mapping[str, CellView]


def summed(x: Tensor, group: Group | None) -> Tensor:
    """Return the sum of the ranks' parts of an output. None: there is only one rank."""
    return x if group is None else group.all_reduce(x)


class Mixer(Protocol):
    """The part of a layer that mixes tokens, such as attention. It stores KV or states for later
    tokens."""

    def forward(self, x: Tensor, step: ModelStep, kept: KeptStates) -> Tensor:
        """Mix the step's tokens. With several ranks, the output is the sum over the ranks.

        Args:
            x: [num_tokens, hidden].
            kept: memory that the layer reads and writes.
        Returns:
            [num_tokens, hidden].
        """
        ...


class Ffn(Protocol):
    """The part of a layer that processes each token separately."""

    def forward(self, x: Tensor, step: ModelStep) -> Tensor:
        """Return the output for x [num_tokens, hidden], of the same shape. With several ranks, the
        output is the sum over the ranks."""
        ...

    def take_part(self, x: Tensor) -> None:
        """Take part in the experts' computation in a step in which this node has no tokens.

        Args:
            x: [0, hidden], of the model's compute dtype.
        """
        ...


class MixerSpec(Protocol):
    @property
    def keeps(self) -> LayerState: ...

    def products(self, hidden_size: int) -> int:
        """Return the number of multiplications with weights per token."""
        ...

    def build(self, site: LayerSite) -> Mixer: ...


class FfnSpec(Protocol):
    def products(self, hidden_size: int) -> int:
        """Return the number of multiplications with weights per token."""
        ...

    def build(self, site: LayerSite) -> Ffn: ...


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
