"""What one layer of a model keeps of the tokens before."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A key and a value for each head, of every token or of those within a window.

    window: tokens that a query sees, its own included; None: all.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
