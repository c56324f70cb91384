"""What one layer of a model keeps of the tokens before: of each of them, or of all together."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Cells:
    """A tensor of a request, in `count` parts (heads) that are kept apart.

    shape: of a part. dtype: None: the one that the model computes in.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def num_bytes(self, computed_in: torch.dtype) -> int:
        """Of one part."""
        return math.prod(self.shape) * (self.dtype or computed_in).itemsize


class State(Protocol):
    """What a layer keeps. What is not of its kind is nothing, and so takes nothing."""

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, its own included; None: all."""
        ...

    @property
    def token_numbers(self) -> int:
        """Kept of each token."""
        ...

    @property
    def cells(self) -> tuple[Cells, ...]:
        """Kept of the request, whatever its length."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of what is kept of a token: heads, vectors of each, and numbers of a vector."""
        ...

    @property
    def words(self) -> str:
        """That shape, as nodes compare it."""
        ...


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A key and a value for each head, of every token or of those within a window.

    window: tokens that a query sees, its own included; None: all.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def token_numbers(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    @property
    def cells(self) -> tuple[Cells, ...]:
        return ()

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.kv_heads, 2, self.head_dim

    @property
    def words(self) -> str:
        return f"{self.kv_heads} heads x {self.head_dim}"


@dataclass(frozen=True, slots=True)
class PagedLatent:
    """One vector for each token, from which every head makes its key and its value."""

    size: int

    @property
    def window(self) -> None:
        return None

    @property
    def token_numbers(self) -> int:
        return self.size

    @property
    def cells(self) -> tuple[Cells, ...]:
        return ()

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1, 1, self.size

    @property
    def words(self) -> str:
        return f"a latent of {self.size}"


@dataclass(frozen=True, slots=True)
class DraftState:
    """What a drafter keeps beside a model's layers: of each token as a layer does, and once a page
    a vector of so many numbers, an even number of them."""

    layer: State
    vector: int

    @property
    def words(self) -> str:
        return f"{self.layer.words} and a vector of {self.vector}"


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Tensors that every token changes, and that are as large after one as after many."""

    cells: tuple[Cells, ...]

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
