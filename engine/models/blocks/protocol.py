"""What a decoder knows of its blocks: how each is built, and how it takes part in a forward.

A spec is numbers that come from a configuration; it builds the block that computes by them.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from engine.batch.forward import ForwardBatch
from engine.kv_cache.states import State
from engine.models.blocks.late_states import LateStates
from engine.models.blocks.source import Source
from engine.models.linear import Linear
from kernels.linear_attention.state_cells import CellView

T = TypeVar("T")


class Shared:
    """What several blocks have in common, made by the first of them that asks."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made


@dataclass(frozen=True, slots=True)
class Site:
    """Where a block is built. shared: among all blocks of the model."""

    source: Source
    hidden_size: int
    shared: Shared = field(default_factory=Shared)

    def within(self, prefix: str) -> "Site":
        return replace(self, source=self.source.within(prefix))


class Adapted(Protocol):
    """What the adapters of a step's requests add to products with the model's matrices."""

    def add(self, product: Linear, x: Tensor, y: Tensor) -> None:
        """
        Args:
            product: the model's own; of those that no adapter adds to nothing becomes.
            x: [num_tokens, in], what was multiplied.
            y: contiguous [num_tokens, out], changed in place.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward. adapted: None where no row has an adapter; late: what layers add to where rows
    have drafts, else None; shared: among all its layers."""

    batch: ForwardBatch
    adapted: Adapted | None = None
    late: LateStates | None = None
    shared: Shared = field(default_factory=Shared)

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """linear.apply(x), with what the adapters of some tokens add."""
        y = linear.apply(x)
        if self.adapted is not None:
            self.adapted.add(linear, x, y)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What a layer keeps of tokens: its view of the pool (KVLayout.view), and the table that has
    the pages; and of requests: its cells, by name."""

    view: Tensor
    table: int
    cells: Mapping[str, CellView]


class Mixer(Protocol):
    """The part of a layer in which tokens meet; it keeps what later ones will need."""

    def forward(self, x: Tensor, step: Step, kept: Kept) -> Tensor:
        """
        Args:
            x: [num_tokens, hidden].
            kept: where the layer reads and writes.
        Returns:
            [num_tokens, hidden].
        """
        ...


class KeepingMixer(Mixer, Protocol):
    def keep(self, x: Tensor, step: Step, kept: Kept) -> object:
        """Writes what later tokens will need of these, x [num_tokens, hidden], and no more."""
        ...


class Ffn(Protocol):
    """The part of a layer in which each token is alone."""

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """x [num_tokens, hidden] -> the same shape."""
        ...


class MixerSpec(Protocol):
    @property
    def keeps(self) -> State: ...

    def products(self, hidden_size: int) -> int:
        """Multiplications of a token with weights."""
        ...

    def build(self, site: Site) -> Mixer: ...


class KeepingMixerSpec(Protocol):
    @property
    def keeps(self) -> State: ...

    def build(self, site: Site) -> KeepingMixer: ...


class FfnSpec(Protocol):
    def products(self, hidden_size: int) -> int:
        """Multiplications of a token with weights."""
        ...

    def build(self, site: Site) -> Ffn: ...
