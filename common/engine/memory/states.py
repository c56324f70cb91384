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
    def heads(self) -> tuple[int, int]:
        """Those of keys and values, and the size of one."""
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
    def heads(self) -> tuple[int, int]:
        return self.kv_heads, self.head_dim


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
    def heads(self) -> tuple[int, int]:
        return 0, 0
