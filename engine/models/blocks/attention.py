"""Attention of a layer over paged KV, and the attention plan that the layers of a forward share."""

from dataclasses import dataclass, replace

from torch import Tensor

from engine.batch.forward import ForwardBatch
from engine.batch.images import VisibleImage
from engine.kv_cache.states import PagedKV, own_heads
from engine.models.blocks.layer import KeptStates, LayerSite, ModelStep, Norm, RmsNorm
from engine.models.blocks.rotation import Rope, Rotation
from engine.models.linear import Linear, scaled
from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import AttentionPlan, paged_attention
from kernels.attention.reference import KeySpan, ReferencePlan, plan_spans
from kernels.backends.chosen import operations
from kernels.narrow import KVScales
from kernels.pages.rope_and_store import rope_and_store


def rows_of(batch: ForwardBatch, table: int) -> AttentionRows:
    """Return all rows of a batch with their pages of a page table."""
    return AttentionRows(
        batch.page_ids,
        batch.page_starts[table],
        batch.query_starts,
        batch.lengths,
        batch.token_ids.shape[0],
        batch.num_decodes,
    )


def attention_plan(step: ModelStep, kept: KeptStates, kind: AttentionKind) -> AttentionPlan:
    """Return the plan for all layers of a page table. These attend to the same tokens, with heads
    of the same shape."""
    return step.shared.get(
        (kept.table, kind),
        lambda: operations().plan_attention(rows_of(step.batch, kept.table), kept.view, kind),
    )


def whole_image_plan(step: ModelStep, kept: KeptStates, window: int | None) -> ReferencePlan:
    """Return the plan for the step's image tokens, which attend to all tokens of their image. It
    replaces `attention_plan` for these tokens. No chunk ends within an image."""
    batch = step.batch

    def make() -> ReferencePlan:
        spans = [
            KeySpan(part.row, part.place, part.at, part.at + part.last - part.first)
            for part in batch.seen
            if isinstance(part, VisibleImage)
        ]
        return plan_spans(spans, batch.page_ids, batch.page_starts[kept.table], kept.view, window)

    return step.shared.get(("images", kept.table, window), make)


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention, with the numbers of its configuration.

    Attributes:
        scale: factor of the products of queries and keys.
        window: number of tokens to which a query attends, including its own. None: all.
        soft_cap: scores are soft_cap * tanh(score / soft_cap). None: no cap.
        sinks: whether each head has one more score, for a key without a value.
        qk_norm: norm of each head of queries and of keys, before rotation. None: no norm.
        of_two: whether the input is two vectors per token, concatenated.
        whole_images: whether image tokens attend to all tokens of their image, including later
            ones. Not with `output_gate`.
        output_gate: whether each head's output is multiplied by the sigmoid of a gate, which is
            projected together with its query.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None
    sinks: bool = False
    output_gate: bool = False
    of_two: bool = False
    whole_images: bool = False

    @property
    def keeps(self) -> PagedKV:
        return PagedKV(self.kv_heads, self.head_dim, self.window)

    def products(self, hidden_size: int) -> int:
        queries = (3 if self.output_gate else 2) * self.heads
        return hidden_size * self.head_dim * (queries + 2 * self.kv_heads)

    def build(self, site: LayerSite) -> "AttentionBlock":
        source = site.source.within("self_attn.")
        share = source.share
        heads = share.part(self.heads, "attention heads")
        kv_heads = own_heads(self.kv_heads, share.rank, share.size)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norm, size = self.qk_norm, self.head_dim
        of_head = 2 * size if self.output_gate else size
        own_kv = (scaled(kv_heads, size),)
        return AttentionBlock(
            spec=replace(self, heads=len(heads), kv_heads=len(kv_heads)),
            rotation=site.shared.get(self.rope, lambda: self.rope.build(source.device)),
            qkv=source.linear(
                {"q_proj": self.heads * of_head, "k_proj": kv, "v_proj": kv},
                site.hidden_size * (2 if self.of_two else 1),
                bias=self.qkv_bias,
                outputs={"q_proj": (scaled(heads, of_head),), "k_proj": own_kv, "v_proj": own_kv},
            ),
            q_norm=None if norm is None else norm.build(source, "q_norm", size),
            k_norm=None if norm is None else norm.build(source, "k_norm", size),
            kv_scales=KVScales(source.scale("k_scale"), source.scale("v_scale")),
            sinks=source.tensor("sinks", (self.heads,), rows=(heads,)) if self.sinks else None,
            output=source.linear(
                {"o_proj": site.hidden_size},
                q,
                bias=self.output_bias,
                inputs=scaled(heads, size),
            ),
        )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    spec: Attention
    rotation: Rotation
    qkv: Linear  # hidden -> Q, K, V. Each head's gate follows its query, if there are gates
    q_norm: RmsNorm | None  # over one head
    k_norm: RmsNorm | None
    kv_scales: KVScales  # for KV stored in 8 bits
    sinks: Tensor | None  # [heads]
    output: Linear

    def forward(self, x: Tensor, step: ModelStep, kept: KeptStates) -> Tensor:
        spec, scales = self.spec, self.kv_scales.where(kept.view.dtype)
        q, gate = self.keep(x, step, kept)
        plan = attention_plan(step, kept, AttentionKind(spec.heads, spec.window))
        scoring = Scoring(spec.scale * scales.key, spec.soft_cap, self.sinks)
        x = paged_attention(q, kept.view, plan, scoring, gate)
        if spec.whole_images and step.batch.seen:
            whole_image_plan(step, kept, spec.window).attend_into(x, q, kept.view, scoring)
        if scales.value != 1.0:
            x = x * scales.value
        return step.product(self.output, x)

    def keep(self, x: Tensor, step: ModelStep, kept: KeptStates) -> tuple[Tensor, Tensor | None]:
        """Write keys and values. Return the queries and the gates, as views of the projection:
        [num_tokens, heads, head_dim] both."""
        batch, rotation = step.batch, self.rotation
        angles = step.shared.get(rotation, lambda: rotation.angles(batch.positions))
        qkv, spec = step.product(self.qkv, x), self.spec
        q = rope_and_store(
            qkv,
            angles,
            kept.view,
            batch.locations[kept.table],
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
            scales=self.kv_scales.where(kept.view.dtype),
            gated=spec.output_gate,
        )
        if not spec.output_gate:
            return q, None
        # A view of all columns has the same strides for any number of tokens, even for one.
        by_head = qkv.view(len(x), qkv.shape[1] // spec.head_dim, spec.head_dim)
        return q, by_head[:, 1 : 2 * spec.heads : 2]
