"""The choice between Baton's kernels and operations of optional packages.

The engine sets the choice once per process. Layers call `operations`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from kernels.attention import paged
from kernels.attention.arguments import AttentionKind, AttentionRows
from kernels.linear_attention import delta_rule
from kernels.linear_attention.delta_rule import Gates
from kernels.linear_attention.state_cells import CellView, StateRows

# Signatures of `kernels.attention.paged.plan_attention` and
# `kernels.linear_attention.delta_rule.delta_rule`.
PlanAttention: TypeAlias = Callable[[AttentionRows, Tensor, AttentionKind], paged.AttentionPlan]
DeltaRule: TypeAlias = Callable[[Tensor, Gates, CellView, StateRows], Tensor]


@dataclass(slots=True)
class Operations:
    """The operations that a package can replace. The defaults are Baton's kernels."""

    plan_attention: PlanAttention = paged.plan_attention
    delta_rule: DeltaRule = delta_rule.delta_rule


_used: list[Operations] = [Operations()]


def use_operations(operations: Operations) -> None:
    """Set the operations of this process. Must be called before a model is loaded."""
    _used[:] = [operations]


def operations() -> Operations:
    return _used[0]
