"""The choice between kernels of this repository and operations of optional packages.

The engine sets the choice once for its process. Layers call what `operations` returns.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.attention import paged
from kernels.linear_attention import delta_rule
from kernels.linear_attention.delta_rule import Gates
from kernels.linear_attention.state_cells import CellView, StateRows


class PlanAttention(Protocol):
    """The signature of `kernels.attention.paged.plan_attention`."""

    def __call__(
        self,
        page_ids: Tensor,
        page_starts: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        kv: Tensor,
        *,
        num_heads: int,
        num_tokens: int,
        num_decodes: int,
        window: int | None = None,
        value_dim: int | None = None,
    ) -> paged.AttentionPlan: ...


class DeltaRule(Protocol):
    """The signature of `kernels.linear_attention.delta_rule.delta_rule`."""

    def __call__(self, x: Tensor, gates: Gates, cells: CellView, rows: StateRows) -> Tensor: ...


@dataclass(slots=True)
class Operations:
    """The operations that a package can replace. The defaults are kernels of this repository."""

    plan_attention: PlanAttention = paged.plan_attention
    delta_rule: DeltaRule = delta_rule.delta_rule


_used: list[Operations] = [Operations()]


def use_operations(operations: Operations) -> None:
    """Set the operations of this process. Must be called before a model is loaded."""
    _used[:] = [operations]


def operations() -> Operations:
    """Return the operations that layers call."""
    return _used[0]
