"""The data that one layer of a model keeps of earlier tokens: per token, or for all together."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


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


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A key and a value for each head, for every token or for those within a window.

    window: tokens that a query sees, its own included; None: all.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None

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
        return f"{self.kv_heads} heads x {self.head_dim}"


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


@dataclass(frozen=True, slots=True)
class DraftState:
    """The data that a drafter keeps: per token the data of a layer, and per page a vector of
    `vector` numbers. `vector` is even."""

    layer: LayerState
    vector: int

    @property
    def words(self) -> str:
        return f"{self.layer.words} and a vector of {self.vector}"


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
