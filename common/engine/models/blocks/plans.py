"""The plan of a forward's attention, which all layers alike share."""

from common.engine.models.blocks.protocol import Kept, Step
from kernels.attention.paged import AttentionPlan, plan_attention


def attention_plan(
    step: Step, kept: Kept, *, heads: int, window: int | None = None, value_dim: int | None = None
) -> AttentionPlan:
    """One for all layers of a table: they see the same tokens, with heads of the same shape.

    Args:
        window, value_dim: as `plan_attention` takes them.
    """
    batch = step.batch
    return step.shared.get(
        (kept.table, heads, window, value_dim),
        lambda: plan_attention(
            batch.page_ids,
            batch.page_starts[kept.table],
            batch.query_starts,
            batch.lengths,
            kept.view,
            num_heads=heads,
            num_tokens=batch.token_ids.shape[0],
            num_decodes=batch.num_decodes,
            window=window,
            value_dim=value_dim,
        ),
    )
