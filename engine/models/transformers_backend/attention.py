"""Paged attention as an attention function of transformers.

The function is registered once for all models. The calling module gives access to the layer, the
step and the pages.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.models.blocks.attention import rows_of
from kernels.attention.arguments import AttentionKind, Scoring
from kernels.attention.paged import AttentionPlan, paged_attention
from kernels.backends.chosen import operations
from kernels.pages.store_kv import store_kv

# transformers has no mask function under this name, so classes create no mask.
NAME = "baton"
# Attribute of an attention module: its PagedLayer.
_PLACE = "paged_layer"


class CurrentStep(threading.local):
    """The current step of one model in this thread, shared by its layers."""

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._pool: KVPool | None = None
        self._plans: dict[tuple[int, AttentionKind], AttentionPlan] = {}

    @contextmanager
    def of(self, batch: ForwardBatch, pool: KVPool) -> Iterator[None]:
        """Set the batch and pool for layers that run inside the context."""
        self._batch, self._pool = batch, pool
        try:
            yield
        finally:
            self._batch = self._pool = None
            self._plans.clear()

    @property
    def batch(self) -> ForwardBatch:
        assert self._batch is not None, "attention outside of a step"
        return self._batch

    def pages(self, layer: int) -> Tensor:
        assert self._pool is not None, "attention outside of a step"
        return self._pool.layers[layer]

    def table(self, layer: int) -> int:
        """Return the index of the batch's page table for the layer."""
        assert self._pool is not None, "attention outside of a step"
        return self._pool.layout.places[layer].table

    def plan(self, table: int, kv: Tensor, kind: AttentionKind) -> AttentionPlan:
        key = (table, kind)
        if key not in self._plans:
            rows = rows_of(self.batch, table)
            self._plans[key] = operations().plan_attention(rows, kv, kind)
        return self._plans[key]


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """The attention of one layer.

    Attributes:
        place: index of its KV among the pool's layers.
        stores: False if an earlier layer stores K and V for both.
    """

    step: CurrentStep
    place: int
    stores: bool
    window: int | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Return [num_tokens, heads, v's head_dim].

        Args:
            q, k, v: [heads, num_tokens, head_dim], after norms and rotation. The numbers of heads
                may differ, and also the head_dim of v.
        """
        kv, table = self.step.pages(self.place), self.step.table(self.place)
        if self.stores:
            store_kv(k.transpose(0, 1), v.transpose(0, 1), kv, self.step.batch.locations[table])
        plan = self.step.plan(table, kv, AttentionKind(q.shape[0], self.window))
        wide = F.pad(q, (0, kv.shape[4] - q.shape[2])).transpose(0, 1)
        out = paged_attention(wide, kv, plan, scoring)
        return out.view(q.shape[1], q.shape[0], kv.shape[4])[..., : v.shape[2]]


def attach(module: nn.Module, layer: PagedLayer) -> None:
    """Make `module` use `layer` for attention from now on."""
    setattr(module, _PLACE, layer)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention for transformers, with a batch size of 1: [1, heads, num_tokens, head_dim]
    each."""
    layer: PagedLayer = getattr(module, _PLACE)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.flatten()
    out = layer.attend(query[0], key[0], value[0], Scoring(scale, softcap, sinks))
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, _attend)
