"""The data that one layer of a model keeps of earlier tokens: per token, or for all together."""

import math
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

import torch

from common.errors import ConfigError


def own_heads(heads: int, place: int, tp: int) -> range:
    """Return the heads of rank `place` of `tp`: its part, or one that several ranks have.

    Raises:
        ConfigError: the ranks cannot have equal numbers of heads.
    """
    if heads % tp == 0:
        return range(place * heads // tp, (place + 1) * heads // tp)
    if tp % heads == 0:
        return range(place * heads // tp, place * heads // tp + 1)
    raise ConfigError(
        f"{tp} ranks cannot have equal parts of {heads} KV heads: the number of ranks must divide "
        f"the number of heads, or be a multiple of it"
    )


@dataclass(frozen=True, slots=True)
class StateCells:
    """A tensor of a request, in `count` parts (heads) that are stored separately.

    shape: of a part. dtype: None: the one that the model computes in.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def num_bytes(self, computed_in: torch.dtype) -> int:
        """Return the bytes of one part."""
        return math.prod(self.shape) * (self.dtype or computed_in).itemsize

    def own(self, place: int, tp: int) -> range:
        """Return the parts of rank `place` of `tp`. Raise ConfigError if they are not equal."""
        if self.count % tp:
            raise ConfigError(
                f"{tp} ranks cannot have equal parts of the {self.count} heads of {self.name!r}: "
                f"the number of ranks must divide the number of heads"
            )
        return own_heads(self.count, place, tp)


class LayerState(Protocol):
    """The data that a layer keeps. Properties that do not apply are empty and take no memory."""

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, its own included; None: all."""
        ...

    @property
    def token_numbers(self) -> int:
        """Numbers kept per token."""
        ...

    @property
    def cells(self) -> tuple[StateCells, ...]:
        """Cells kept per request, whatever its length."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape per token: heads, vectors per head, and numbers per vector."""
        ...

    @property
    def words(self) -> str:
        """The shape as text, which nodes compare."""
        ...

    def share(self, place: int, tp: int) -> "LayerState":
        """Return the part that rank `place` of `tp` keeps. Raise ConfigError if ranks cannot split
        it."""
        ...

    def own(self, place: int, tp: int) -> range:
        """Return the heads of `shape` that rank `place` of `tp` keeps. Raises ConfigError as
        `share`."""
        ...


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A key and a value for each head, for every token or for those within a window.

    window: tokens that a query sees, its own included; None: all.
    split: ranks have different heads. False: every rank keeps all of them.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    split: bool = field(default=True, repr=False)  # the same for all numbers of ranks

    @property
    def token_numbers(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    @property
    def cells(self) -> tuple[StateCells, ...]:
        return ()

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.kv_heads, 2, self.head_dim

    @property
    def words(self) -> str:
        whole = "" if self.split else " on every rank"
        return f"{self.kv_heads} heads x {self.head_dim}{whole}"

    def share(self, place: int, tp: int) -> "PagedKV":
        return replace(self, kv_heads=len(self.own(place, tp)))

    def own(self, place: int, tp: int) -> range:
        return own_heads(self.kv_heads, place, tp) if self.split else range(self.kv_heads)


@dataclass(frozen=True, slots=True)
class PagedLatent:
    """One vector per token, from which every head computes its key and its value."""

    size: int

    @property
    def window(self) -> None:
        return None

    @property
    def token_numbers(self) -> int:
        return self.size

    @property
    def cells(self) -> tuple[StateCells, ...]:
        return ()

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1, 1, self.size

    @property
    def words(self) -> str:
        return f"a latent of {self.size}"

    def share(self, place: int, tp: int) -> "PagedLatent":
        return self  # every head of every rank needs it

    def own(self, place: int, tp: int) -> range:
        return range(1)


@dataclass(frozen=True, slots=True)
class DraftState:
    """The data that a drafter keeps: per token the data of its layers, and per page one vector.

    Attributes:
        vector: size of the vector, even. 0: the drafter keeps no vector.
    """

    layers: tuple[LayerState, ...]
    vector: int = 0

    @property
    def words(self) -> str:
        kinds = groupby(layer.words for layer in self.layers)
        layers = ", ".join(f"{len(list(same))} layers x {words}" for words, same in kinds)
        return f"{layers} and a vector of {self.vector}" if self.vector else layers

    def share(self, place: int, tp: int) -> "DraftState":
        return replace(self, layers=tuple(layer.share(place, tp) for layer in self.layers))


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Tensors that every token updates, and whose size does not depend on the number of tokens."""

    cells: tuple[StateCells, ...]

    @property
    def window(self) -> None:
        return None

    @property
    def token_numbers(self) -> int:
        return 0

    @property
    def shape(self) -> tuple[int, int, int]:
        return 0, 0, 0

    @property
    def words(self) -> str:
        return "nothing"

    def share(self, place: int, tp: int) -> "RecurrentState":
        cells = (replace(each, count=len(each.own(place, tp))) for each in self.cells)
        return RecurrentState(tuple(cells))

    def own(self, place: int, tp: int) -> range:
        return range(0)
