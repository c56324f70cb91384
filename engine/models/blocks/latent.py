"""Multi-head latent attention (MLA): each head computes its key and value from one latent per
token.

The projections to keys and values are merged into those of queries and outputs. For chunks, latents
are expanded to keys and values instead, if that is less work. The bits of a chunk then depend on
its length, so `in_one_way` disables the expansion.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kv_cache.states import PagedLatent
from engine.models.blocks.attention import attention_plan, rows_of
from engine.models.blocks.layer import KeptStates, LayerSite, ModelStep, Norm, RmsNorm
from engine.models.blocks.rotation import Rope, Rotation
from engine.models.linear import Linear, scaled
from kernels.attention.arguments import AttentionKind, Scoring
from kernels.attention.expanded import plan_expanded
from kernels.attention.expansion import ExpandedPlan, LatentExpansion
from kernels.attention.paged import AttentionPlan, paged_attention
from kernels.backends.chosen import operations
from kernels.layers.by_head import HeadMatrices
from kernels.pages.store_latents import rope_and_store_latents


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Latent attention, with the numbers of its configuration.

    Attributes:
        rank: numbers of a latent that do not depend on the position.
        rotated: additional numbers with the token's position, which the keys of all heads share.
        key_dim, value_dim: sizes per head, without the rotated part.
        query_rank: size of the latents of queries. None: queries are projected directly from hidden
            states.
        interleaved: whether neighbouring numbers are rotated together. False: numbers that are
            `rotated` / 2 apart.
        bias: whether the projections to latents and of the output have a bias.

    Source: DeepSeek-V2, 2024, section 2.1.
    """

    heads: int
    rank: int
    rotated: int
    key_dim: int
    value_dim: int
    query_rank: int | None
    rope: Rope
    scale: float
    norm: Norm
    interleaved: bool = True
    bias: bool = False

    @property
    def keeps(self) -> PagedLatent:
        return PagedLatent(self.rank + self.rotated)

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rotated

    def products(self, hidden_size: int) -> int:
        queries, inputs = self.heads * self.query_dim, hidden_size
        if self.query_rank is not None:
            inputs = self.query_rank
        through = hidden_size * (self.query_rank or 0) + inputs * queries
        latents = hidden_size * (self.rank + self.rotated)
        absorbed = self.heads * self.rank * (self.key_dim + self.value_dim)
        return through + latents + absorbed + self.heads * self.value_dim * hidden_size

    def build(self, site: LayerSite) -> "LatentAttentionBlock":
        source = site.source.within("self_attn.")
        heads = source.share.part(self.heads, "attention heads")
        queries, latents = self.heads * self.query_dim, self.rank + self.rotated
        own_queries = (scaled(heads, self.query_dim),)
        name, size, query_norm, query_up = "q_proj", queries, None, None
        if self.query_rank is not None:
            name, size = "q_a_proj", self.query_rank
            query_norm = self.norm.build(source, "q_a_layernorm", self.query_rank)
            query_up = source.linear(
                {"q_b_proj": queries}, self.query_rank, outputs={"q_b_proj": own_queries}
            )
        of_head = self.key_dim + self.value_dim
        own_up = (scaled(heads, of_head),)
        up = source.matrix("kv_b_proj", self.heads * of_head, self.rank, own_up)
        by_head = up.view(len(heads), of_head, self.rank)
        # Contiguous, because torch's products on a CPU are ten times slower otherwise. Copies,
        # because a view of one head would keep the whole matrix in memory.
        expansion = LatentExpansion(
            keys=_contiguous_copy(by_head[:, : self.key_dim]),
            values=_contiguous_copy(by_head[:, self.key_dim :].transpose(1, 2)),
        )
        return LatentAttentionBlock(
            spec=replace(self, heads=len(heads)),
            rotation=site.shared.get(self.rope, lambda: self.rope.build(source.device)),
            down=source.linear(
                {name: size, "kv_a_proj_with_mqa": latents},
                site.hidden_size,
                bias=self.bias,
                outputs={"q_proj": own_queries},
            ),
            query_norm=query_norm,
            query_up=query_up,
            latent_norm=self.norm.build(source, "kv_a_layernorm", self.rank),
            expansion=expansion,
            keys=source.by_head(expansion.keys),
            values=source.by_head(expansion.values),
            output=source.linear(
                {"o_proj": site.hidden_size},
                self.heads * self.value_dim,
                bias=self.bias,
                inputs=scaled(heads, self.value_dim),
            ),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttentionBlock:
    spec: LatentAttention
    rotation: Rotation
    down: Linear  # hidden -> queries or their latents, latents, the rotated part
    query_norm: RmsNorm | None
    query_up: Linear | None
    latent_norm: RmsNorm
    expansion: LatentExpansion | None  # None: latents are never expanded
    keys: HeadMatrices  # matrices of `expansion`, for attention over latents
    values: HeadMatrices
    output: Linear

    def in_one_way(self) -> "LatentAttentionBlock":
        """Return a block that attends to latents in all steps, so that a token's bits do not depend
        on its chunk. Prompts take longer."""
        return replace(self, expansion=None)

    def keep(self, x: Tensor, step: ModelStep, kept: KeptStates) -> None:
        """Write latents, and compute nothing else."""
        self._stored(x, step, kept, self.spec.key_dim)

    def forward(self, x: Tensor, step: ModelStep, kept: KeptStates) -> Tensor:
        spec = self.spec
        out = x.new_empty(len(x), spec.heads, spec.value_dim)
        plans = _plans_of(
            step, kept, self.expansion, AttentionKind(spec.heads, value_dim=spec.rank)
        )
        if plans.chunks is None or self.expansion is None:
            queries, q = self._stored(x, step, kept, spec.rank)
            self._attend_to_latents(queries, q, kept, plans.rest, out)
            return step.product(self.output, out.flatten(1))
        queries, q = self._stored(x, step, kept, spec.key_dim)
        first = plans.chunks.num_tokens
        q[:first, :, : spec.key_dim] = queries[:first, :, : spec.key_dim]
        plans.chunks.attend(q[:first], kept.view, self.expansion, out[:first], scale=spec.scale)
        if first < len(x):
            wide = x.new_empty(len(x) - first, spec.heads, spec.rank + spec.rotated)
            wide[..., spec.rank :] = q[first:, :, spec.key_dim :]
            self._attend_to_latents(queries[first:], wide, kept, plans.rest, out[first:])
        return step.product(self.output, out.flatten(1))

    def _stored(
        self, x: Tensor, step: ModelStep, kept: KeptStates, width: int
    ) -> tuple[Tensor, Tensor]:
        """Write latents. Return queries as in `_projected`, and a buffer [num_tokens, heads, width
        + rotated] for queries, whose rotated ends are already written."""
        spec, batch, rotation = self.spec, step.batch, self.rotation
        angles = step.shared.get(rotation, lambda: rotation.angles(batch.positions))
        queries, latents = self._projected(x, step)
        q = x.new_empty(len(x), spec.heads, width + spec.rotated)
        rope_and_store_latents(
            latents,
            self.latent_norm.weight,
            self.latent_norm.eps,
            queries[..., spec.key_dim :],
            angles,
            kept.view,
            batch.locations[kept.table],
            q[..., width:],
            interleaved=spec.interleaved,
        )
        return queries, q

    def _attend_to_latents(
        self, queries: Tensor, q: Tensor, kept: KeptStates, plan: AttentionPlan, out: Tensor
    ) -> None:
        """Attend from queries to latents, and write the result to `out`. `q`: buffer with the width
        of a latent."""
        spec = self.spec
        self.keys.multiply(queries[..., : spec.key_dim], q[..., : spec.rank])
        seen = paged_attention(q, kept.view, plan, Scoring(spec.scale))
        self.values.multiply(seen.view(len(q), spec.heads, spec.rank), out)

    def _projected(self, x: Tensor, step: ModelStep) -> tuple[Tensor, Tensor]:
        """Return queries [num_tokens, heads, query_dim], and latents with the part to be
        rotated."""
        spec, x = self.spec, step.product(self.down, x)
        first = x.shape[1] - spec.rank - spec.rotated
        queries, latents = x[:, :first], x[:, first:]
        if self.query_norm is not None and self.query_up is not None:
            queries = step.product(self.query_up, self.query_norm.forward(queries)[0])
        return queries.view(len(x), spec.heads, spec.query_dim), latents


class _LatentPlans(NamedTuple):
    """The two plans of a forward over latents.

    Attributes:
        chunks: attention of the step's first tokens over expanded keys and values. None: no row is
            expanded.
        rest: attention of all other tokens over latents.
    """

    chunks: ExpandedPlan | None
    rest: AttentionPlan


def _plans_of(
    step: ModelStep, kept: KeptStates, expansion: LatentExpansion | None, kind: AttentionKind
) -> _LatentPlans:
    """Return the plans for latent attention. See `attention_plan`. Either all rows before the
    decode rows are expanded, or none."""
    if expansion is None:
        return _LatentPlans(None, attention_plan(step, kept, kind))

    def parted() -> _LatentPlans:
        rows = rows_of(step.batch, kept.table)
        chunks = plan_expanded(rows.extends(), kept.view, expansion, step.batch.extends)
        if chunks is None:
            return _LatentPlans(None, attention_plan(step, kept, kind))
        return _LatentPlans(chunks, operations().plan_attention(rows.decodes(), kept.view, kind))

    return step.shared.get((kept.table, expansion.keys.shape), parted)


def _contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
