"""The attention plan of a forward, shared by all layers of the same shape."""

from typing import NamedTuple

from engine.batch.images import VisibleImage
from engine.models.blocks.protocol import KeptStates, ModelStep
from kernels.attention.expanded import plan_expanded
from kernels.attention.expansion import ExpandedPlan, LatentExpansion
from kernels.attention.paged import AttentionPlan
from kernels.attention.reference import KeySpan, ReferencePlan, plan_spans
from kernels.backends.chosen import operations


def attention_plan(
    step: ModelStep,
    kept: KeptStates,
    *,
    heads: int,
    window: int | None = None,
    value_dim: int | None = None,
) -> AttentionPlan:
    """Return the plan of all layers of a page table. They see the same tokens, with heads of the
    same shape.

    Args:
        window, value_dim: as `plan_attention` takes them.
    """
    batch = step.batch
    return step.shared.get(
        (kept.table, heads, window, value_dim),
        lambda: operations().plan_attention(
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


def whole_image_plan(step: ModelStep, kept: KeptStates, *, window: int | None) -> ReferencePlan:
    """Return the plan of the step's image tokens, which see all tokens of their image. It attends
    only for these, in place of `attention_plan`. No chunk ends within an image."""
    batch = step.batch

    def make() -> ReferencePlan:
        spans = [
            KeySpan(part.row, part.place, part.at, part.at + part.last - part.first)
            for part in batch.seen
            if isinstance(part, VisibleImage)
        ]
        return plan_spans(spans, batch.page_ids, batch.page_starts[kept.table], kept.view, window)

    return step.shared.get(("images", kept.table, window), make)


class LatentPlans(NamedTuple):
    """The two plans of a forward over latents.

    Attributes:
        chunks: attention of the step's first tokens by expanded keys and values. None: no row is
            expanded.
        rest: attention of all other tokens by latents.
    """

    chunks: ExpandedPlan | None
    rest: AttentionPlan


def latent_plans(
    step: ModelStep, kept: KeptStates, expansion: LatentExpansion | None, *, heads: int, rank: int
) -> LatentPlans:
    """Return the plans for latent attention, like `attention_plan`. Either all rows before the
    decode rows are expanded, or none."""
    if expansion is None:
        return LatentPlans(None, attention_plan(step, kept, heads=heads, value_dim=rank))
    return step.shared.get(
        (kept.table, expansion.keys.shape),
        lambda: _parted(step, kept, expansion, heads=heads, rank=rank),
    )


def _parted(
    step: ModelStep, kept: KeptStates, expansion: LatentExpansion, *, heads: int, rank: int
) -> LatentPlans:
    batch, decodes = step.batch, step.batch.num_decodes
    long, page_starts = batch.num_rows - decodes, batch.page_starts[kept.table]
    chunks = plan_expanded(
        batch.page_ids,
        page_starts[:long],
        batch.query_starts[: long + 1],
        batch.lengths[:long],
        kept.view,
        expansion,
        batch.extends,
    )
    if chunks is None:
        return LatentPlans(None, attention_plan(step, kept, heads=heads, value_dim=rank))
    rest = operations().plan_attention(
        batch.page_ids,
        page_starts[long:],
        batch.query_starts[long:] - chunks.num_tokens,
        batch.lengths[long:],
        kept.view,
        num_heads=heads,
        num_tokens=decodes,
        num_decodes=decodes,
        value_dim=rank,
    )
    return LatentPlans(chunks, rest)
