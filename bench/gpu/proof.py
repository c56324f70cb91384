"""Is a model computed rightly? Its first layers by the kernels, beside the references in float32.

The pool is that of the whole model: layers then lie where they lie in serving.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bench.gpu.engine import PAGE_SIZE
from bench.gpu.forwards import Forwards
from bench.gpu.frame import Row, Tables
from bench.gpu.models import random_weights, shallow, spec_of, widened
from bench.gpu.ops import relative_error, worst
from bench.gpu.setting import Setting
from common.engine.memory.kv import KVLayout, KVPool
from common.engine.models.decoder import DenseDecoder
from kernels import device as kernel_device
from kernels.sampling import sample

TOLERANCE = 3e-2  # of two layers' logits in bfloat16
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
    """Of a pool, as much as a forward looks at."""

    layers: Sequence[Tensor]
    num_pages: int


def row(setting: Setting, name: str) -> Row:
    """The relative error of a model's logits, the worst of a prefill, of a chunk after it, and of a
    decode step."""
    spec = shallow(spec_of(name), LAYERS)
    weights = random_weights(spec, setting.device, setting.dtype)
    with _implemented(by_kernels=True):
        found = _logits(setting, name, DenseDecoder(spec, weights))
    with _implemented(by_kernels=False):
        exact = _logits(setting, name, DenseDecoder(spec, widened(weights)))
    error = worst(*map(relative_error, found, exact))
    right = error <= TOLERANCE  # NaN is not
    return {"table": "proof", "model": name, "error": error, "limit": TOLERANCE, "right": right}


def forwards_by_kernels(setting: Setting, name: str) -> None:
    """Runs what `row` checks, and samples: it compiles all that serving needs."""
    spec = shallow(spec_of(name), LAYERS)
    model = DenseDecoder(spec, random_weights(spec, setting.device, setting.dtype))
    for logits in _logits(setting, name, model):
        sample(logits, None)


def _logits(setting: Setting, name: str, model: DenseDecoder) -> list[Tensor]:
    lengths = setting.sized((700, 77), (21, 9))
    cuts = [[0] * len(lengths), [n // 2 for n in lengths], [n - 1 for n in lengths], lengths]
    num_pages = sum(-(-length // PAGE_SIZE) for length in lengths)
    layout = KVLayout.of(spec_of(name).layers, PAGE_SIZE, model.dtype)
    whole = KVPool(layout, num_pages, model.device)
    whole.tensor.fill_(torch.nan)
    forwards = Forwards(model, _FirstLayers(whole.layers[:LAYERS], num_pages), lengths)
    return [forwards.logits(forwards.batch(*edges)) for edges in pairwise(cuts)]


@contextmanager
def _implemented(by_kernels: bool) -> Iterator[None]:
    """Every operation by its Triton kernel, or every one by its reference."""
    chosen = kernel_device.uses_triton
    kernel_device.uses_triton = lambda tensor: by_kernels
    try:
        yield
    finally:
        kernel_device.uses_triton = chosen
