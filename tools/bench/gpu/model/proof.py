"""Forward passes of a model, and its correctness: the first layers with kernels are compared with
float32 references.

The pool is that of the whole model, so that layers are placed as in serving.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast
from unittest import mock

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
from engine.models.decoder import Decoder
from engine.models.spec import LoadTarget
from kernels import device as kernel_device
from kernels.linear_attention.state_cells import CellView
from kernels.sampling.sample import sample
from tools.bench.gpu.model.engine import PAGE_SIZE
from tools.bench.gpu.model.models import RandomWeights, shallow, spec_of
from tools.bench.gpu.operation import difference, worst
from tools.bench.gpu.process import Row
from tools.bench.gpu.setting import Setting

TOLERANCE = 3e-2  # for two layers' logits in bfloat16
LAYERS = 2


class PromptForwards:
    """Forward passes over prompts, whose pages are scattered over a pool. Nothing is sampled."""

    def __init__(self, model: Model, pool: KVPool, lengths: Sequence[int]) -> None:
        self._model, self._pool = model, pool
        self._table = SlotTable(len(lengths), max(lengths) + 1, PAGE_SIZE)
        self._builder = BatchBuilder(self._table)
        self._future = torch.zeros(len(lengths), dtype=torch.int32, device=model.device)
        rng = np.random.default_rng(0)
        pages = rng.permutation(pool.num_pages).astype(np.int32)
        for key, length in enumerate(lengths):
            slot = self._table.acquire(random_request(key, rng, length, model.spec.vocabulary_size))
            assert slot == key
            own, pages = np.split(pages, [-(-length // PAGE_SIZE)])
            self._table.set_pages(slot, PageHolding.of(own))

    def batch(self, starts: Sequence[int], ends: Sequence[int]) -> ForwardBatch:
        """Return tokens [starts[i], ends[i]) of every prompt i, on the device."""
        batch = ScheduleBatch(
            step=1,
            mode=ForwardMode.EXTEND,
            slots=np.arange(len(starts), dtype=np.int32),
            starts=np.array(starts, np.int32),
            ends=np.array(ends, np.int32),
            samples=np.ones(len(starts), np.bool_),
        )
        return self._builder.build(batch).to(self._model.device)[0]

    @torch.inference_mode()
    def logits(self, batch: ForwardBatch) -> Tensor:
        """Return the logits of every prompt's last token in the batch."""
        return self._model.logits(self._model.forward(batch, self._pool, self._future))


@dataclass(frozen=True, slots=True, eq=False)
class _FirstLayers:
    """The pages of a model's first layers, in the pool of the whole model."""

    layers: Sequence[Tensor]
    tables: Sequence[int]
    cells: Sequence[Mapping[str, CellView]]
    layout: KVLayout
    num_pages: int


def row(setting: Setting, name: str) -> Row:
    """Return a model's worst relative error of logits: prefill, chunk, decode step."""
    with _implemented(by_kernels=True):
        found = _logits(setting, name, _model(setting, name, setting.dtype))
    with _implemented(by_kernels=False):
        exact = _logits(setting, name, _model(setting, name, torch.float32))
    error = worst(*map(difference, found, exact))
    right = error <= TOLERANCE  # false for NaN
    return {"table": "proof", "model": name, "error": error, "limit": TOLERANCE, "right": right}


def forwards_by_kernels(setting: Setting, name: str) -> None:
    """Run the forward passes of `row`, and sample. This compiles all kernels that serving needs."""
    for logits in _logits(setting, name, _model(setting, name, setting.dtype)):
        sample(logits, None)


def _model(setting: Setting, name: str, held: torch.dtype) -> Decoder:
    """Return a model with the same weights, stored in the dtype `held`."""
    torch.manual_seed(0)
    source = RandomWeights(LoadTarget(setting.device, held), drawn=setting.dtype)
    return shallow(spec_of(name), LAYERS).build(source)


def _logits(setting: Setting, name: str, model: Decoder) -> list[Tensor]:
    lengths = setting.sized((700, 77), (21, 9))
    cuts = [[0] * len(lengths), [n // 2 for n in lengths], [n - 1 for n in lengths], lengths]
    num_pages = sum(-(-length // PAGE_SIZE) for length in lengths)
    layout = KVLayout.of(spec_of(name).model.layers, PAGE_SIZE, model.dtype)
    first = replace(layout, places=layout.places[:LAYERS])
    whole = KVPool(layout, num_pages, model.device)
    whole.tensor.fill_(0xFF)  # NaN
    few = slice(LAYERS)
    pool = _FirstLayers(whole.layers[few], whole.tables[few], whole.cells[few], first, num_pages)
    forwards = PromptForwards(model, cast(KVPool, pool), lengths)
    return [forwards.logits(forwards.batch(*edges)) for edges in pairwise(cuts)]


@contextmanager
def _implemented(by_kernels: bool) -> Iterator[None]:
    """Run all operations with Triton kernels, or all with their references."""
    with mock.patch.object(kernel_device, "uses_triton", return_value=by_kernels):
        yield
