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
from engine.models.blocks.attention import attention_plan
from engine.models.blocks.layer import KeptStates, ModelStep
from kernels.attention.arguments import AttentionKind, Scoring
from kernels.attention.paged import paged_attention
from kernels.pages.store_kv import store_kv

# transformers has no mask function under this name, so classes create no mask.
NAME = "baton"
# Attribute of an attention module: its PagedLayer.
_PLACE = "paged_layer"


class CurrentStep(threading.local):
    """The current step of one model in this thread, shared by its layers."""

    def __init__(self) -> None:
        self._step: ModelStep | None = None
        self._pool: KVPool | None = None

    @contextmanager
    def of(self, batch: ForwardBatch, pool: KVPool) -> Iterator[None]:
        """Set the batch and pool for layers that run inside the context."""
        self._step, self._pool = ModelStep(batch), pool
        try:
            yield
        finally:
            self._step = self._pool = None

    def at(self, layer: int) -> tuple[ModelStep, KeptStates]:
        """Return the step, and the memory of a layer."""
        pool = self._pool
        assert self._step is not None and pool is not None, "attention outside of a step"
        return self._step, KeptStates(pool.layers[layer], pool.tables[layer], {})


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
        step, kept = self.step.at(self.place)
        kv = kept.view
        if self.stores:
            locations = step.batch.locations[kept.table]
            store_kv(k.transpose(0, 1), v.transpose(0, 1), kv, locations)
        plan = attention_plan(step, kept, AttentionKind(q.shape[0], self.window))
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
