"""Forward passes of a model over prompts, without scheduler, stream or sampling."""

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from bench.steps import random_request
from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.forward import BatchBuilder, ForwardBatch
from engine.batch.holding import PageHolding
from engine.batch.table import SlotTable
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.models import Model
from tools.bench.gpu.model.engine import PAGE_SIZE


class Pages(Protocol):
    """The methods of a page pool that a forward pass needs."""

    @property
    def layers(self) -> Sequence[Tensor]: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_pages(self) -> int: ...


class Forwards:
    """Prompts of these lengths, with pages scattered over a pool."""

    def __init__(self, model: Model, pool: Pages, lengths: Sequence[int]) -> None:
        self._model = model
        self._pool = pool
        self._table = SlotTable(len(lengths), max(lengths) + 1, PAGE_SIZE)
        self._builder = BatchBuilder(self._table)
        self._future = torch.zeros(len(lengths), dtype=torch.int32, device=model.device)
        rng = np.random.default_rng(0)
        pages = rng.permutation(pool.num_pages).astype(np.int32)
        for key, length in enumerate(lengths):
            slot = self._table.acquire(random_request(key, rng, length, model.spec.vocabulary_size))
            assert slot == key
            count = -(-length // PAGE_SIZE)
            self._table.set_pages(slot, PageHolding.of(pages[:count]))
            pages = pages[count:]

    def batch(self, starts: Sequence[int], ends: Sequence[int]) -> ForwardBatch:
        """Return tokens [starts[i], ends[i]) of every prompt i, on the device."""
        columns = np.array([starts, ends], np.int32)
        batch = ScheduleBatch(
            step=1,
            mode=ForwardMode.EXTEND,
            slots=np.arange(len(starts), dtype=np.int32),
            starts=columns[0],
            ends=columns[1],
            samples=np.ones(len(starts), np.bool_),
        )
        return self._builder.build(batch).to(self._model.device)[0]

    @torch.inference_mode()
    def logits(self, batch: ForwardBatch) -> Tensor:
        """Return the logits of every prompt's last token in the batch."""
        hidden = self._model.forward(batch, cast(KVPool, self._pool), self._future)
        return self._model.logits(hidden)
