"""Correctness of a model: its first layers with kernels, compared with float32 references.

The pool is that of the whole model, so that layers are placed as in serving.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.models.decoder import Decoder
from engine.models.spec import LoadTarget
from kernels import device as kernel_device
from kernels.linear_attention.state_cells import CellView
from kernels.sampling.sample import sample
from tools.bench.gpu.frame import Row, Tables
from tools.bench.gpu.model.engine import PAGE_SIZE
from tools.bench.gpu.model.forwards import Forwards
from tools.bench.gpu.model.models import shallow, spec_of
from tools.bench.gpu.model.weights import RandomWeights
from tools.bench.gpu.ops import relative_error, worst
from tools.bench.gpu.setting import Setting

TOLERANCE = 3e-2  # for two layers' logits in bfloat16
LAYERS = 2
TABLES: Tables = {
    "proof": {
        "first layers of": "{model}",
        "error of the logits": "{error:.1e}",
        "at most": "{limit:g}",
        "right": "{right}",
    }
}


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
    error = worst(*map(relative_error, found, exact))
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
    some = _FirstLayers(
        whole.layers[:LAYERS], whole.tables[:LAYERS], whole.cells[:LAYERS], first, num_pages
    )
    forwards = Forwards(model, some, lengths)
    return [forwards.logits(forwards.batch(*edges)) for edges in pairwise(cuts)]


@contextmanager
def _implemented(by_kernels: bool) -> Iterator[None]:
    """Run all operations with Triton kernels, or all with their references."""
    chosen = kernel_device.uses_triton
    kernel_device.uses_triton = lambda tensor: by_kernels
    try:
        yield
    finally:
        kernel_device.uses_triton = chosen
