"""The data that a layer keeps of earlier tokens: KV or latents per token, or a recurrent state."""

import math
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

import torch

from common.errors import ConfigError


def own_heads(heads: int, place: int, tp: int) -> range:
    """Return the heads of rank `place` of `tp`. Several ranks may have the same head.

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

    shape: shape of a part. dtype: None: the dtype in which the model computes.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def num_bytes(self, computed_in: torch.dtype) -> int:
        """Return the bytes of one part."""
        return math.prod(self.shape) * (self.dtype or computed_in).itemsize

    def own(self, place: int, tp: int) -> range:
        """Return the parts of rank `place` of `tp`. Raise ConfigError if ranks cannot have equal
        numbers."""
        if self.count % tp:
            raise ConfigError(
                f"{tp} ranks cannot have equal parts of the {self.count} heads of {self.name!r}: "
                f"the number of ranks must divide the number of heads"
            )
        return own_heads(self.count, place, tp)


class LayerState(Protocol):
    """The data that a layer keeps. By default, a layer keeps nothing."""

    __slots__ = ()

    @property
    def window(self) -> int | None:
        """Number of tokens to which a query attends, including its own. None: all."""
        return None

    @property
    def token_numbers(self) -> int:
        """Number of values kept per token."""
        return 0

    @property
    def cells(self) -> tuple[StateCells, ...]:
        """State cells kept per request, independent of its length."""
        return ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape per token: heads, vectors per head, numbers per vector."""
        return 0, 0, 0

    @property
    def words(self) -> str:
        """The shape as text, which nodes compare when they pair."""
        return "nothing"

    def share(self, place: int, tp: int) -> "LayerState":
        """Return the part that rank `place` of `tp` keeps. Raise ConfigError if ranks cannot split
        it."""
        return self

    def own(self, place: int, tp: int) -> range:
        """Return the heads of `shape` that rank `place` of `tp` keeps. Raise ConfigError as `share`
        does."""
        return range(self.shape[0])


@dataclass(frozen=True, slots=True)
class PagedKV(LayerState):
    """A key and a value per head and token, for every token or only inside a window.

    split: whether ranks have different heads. False: every rank keeps all of them.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    split: bool = field(default=True, repr=False)  # equal for all numbers of ranks

    @property
    def token_numbers(self) -> int:
        return 2 * self.kv_heads * self.head_dim

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
class PagedLatent(LayerState):
    """One latent vector per token, from which every head on every rank computes its key and its
    value (MLA)."""

    size: int

    @property
    def token_numbers(self) -> int:
        return self.size

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1, 1, self.size

    @property
    def words(self) -> str:
        return f"a latent of {self.size}"


@dataclass(frozen=True, slots=True)
class DraftState:
    """The data that a drafter keeps: its layers' data per token, and one vector per page.

    Attributes:
        vector: size of the vector, an even number. 0: the drafter keeps no vector.
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
class RecurrentState(LayerState):
    """Tensors that every token updates, and whose size does not depend on the number of tokens."""

    cells: tuple[StateCells, ...] = field()  # without the default of LayerState

    def share(self, place: int, tp: int) -> "RecurrentState":
        cells = (replace(each, count=len(each.own(place, tp))) for each in self.cells)
        return RecurrentState(tuple(cells))
