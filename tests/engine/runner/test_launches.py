"""The number of operations that a forward enqueues on a device.

Every launch costs a decode step at least a microsecond, whatever it computes.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from common.config import SpeculativeConfig
from engine.batch.forward import BatchBuilder, ForwardBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.table import SlotTable
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.models import load
from engine.models.blocks.layer import LateStates
from engine.runner.draft_graphs import GraphDrafter
from engine.runner.host_waits import check_capturable
from engine.runner.rehearsal import padding
from engine.sampling.choice_graphs import choice_padding
from kernels import device
from kernels.sampling.sample import SamplingColumns
from tests.support.models.checkpoints import NATIVE_ARCHITECTURES, make_checkpoint
from tests.support.models.drafters import make_draft, make_eagle, make_eagle3, make_mtp
from tests.support.specs import make_batch

CPU = torch.device("cpu")
PAGE_SIZE = 16
LAYER = {
    "product": 4,
    "_add_rms_norm_kernel": 2,
    "_rope_and_store_kernel": 1,
    "_act_and_mul_kernel": 1,
}
# After attention and after the MLP.
GEMMA_LAYER = LAYER | {"_add_rms_norm_kernel": 4}
# The router is a product, too. The experts' products are in kernels of their own.
EXPERTS_LAYER = {
    "product": 3,
    "_add_rms_norm_kernel": 2,
    "_rope_and_store_kernel": 1,
    "_route_kernel": 1,
    "group_kernel": 1,
    "gate_up_kernel": 1,
    "down_kernel": 1,
    "add_pairs_kernel": 1,
}
LAYERS = {"gemma2": GEMMA_LAYER, "qwen3_moe": EXPERTS_LAYER}
ONCE = {"_embed_kernel": 1, "_rope_angles_kernel": 1, "_add_rms_norm_kernel": 1}


class _Operations(TorchDispatchMode):
    """Counts torch's operations that run on a device."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self._counts["product" if name in ("mm", "addmm", "linear") else name] += 1
        return func(*args, **(kwargs or {}))


def batch_of(rows: list[tuple[int, int]], layout: KVLayout) -> ForwardBatch:
    """Return a batch of (new tokens, length) rows."""
    new, ends = np.array(rows, np.int32).T
    table = SlotTable(len(rows), 128, PAGE_SIZE, layout.windows, layout.state_pages)
    table.known[:] = ends
    batch = make_batch(range(len(rows)), ends - new, ends)
    return BatchBuilder(table).build(batch).to(CPU)[0]


def launched(
    directory,
    architecture: str,
    num_layers: int,
    rows: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
) -> Counter[str]:
    """Return the launches of one forward, by kernel or operation. Kernels compute nothing."""
    counts: Counter[str] = Counter()
    where = directory / f"{architecture}-{num_layers}"
    checkpoint = make_checkpoint(where, architecture, num_hidden_layers=num_layers)
    forward = forward_of(checkpoint, rows, dtype)
    with launching(counts), _Operations(counts):
        forward()
    return counts


def forward_of(
    checkpoint, rows: list[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> Callable[[], Tensor]:
    model = load(checkpoint, CPU, dtype)
    layout = KVLayout.of(model.spec.layers, PAGE_SIZE, model.dtype)
    pool, batch = KVPool(layout, 1, CPU), batch_of(rows, layout)
    future = torch.zeros(batch.num_rows, dtype=torch.int32)
    return lambda: model.forward(batch, pool, future)


@contextmanager
def launching(counts: Counter[str]) -> Iterator[None]:
    """Count kernels inside, without running them."""

    def note(kernel, grid):
        return lambda *args, **kwargs: counts.update([kernel.fn.__name__])

    with (
        mock.patch.object(device, "uses_triton", return_value=True),
        mock.patch.object(KernelInterface, "__getitem__", note),
        torch.inference_mode(),
    ):
        yield


DECODE = [(1, 40), (1, 3), (1, 17)]
# Prompts that occupy the device, and rows whose keys are divided among programs.
ROWS = {
    "decode": (DECODE, {"_split_kernel": 1}, {"_plan_kernel": 1}),
    "verify": ([(5, 40), (3, 30), *DECODE], {"_split_kernel": 1}, {"_plan_kernel": 1}),
    "extend": ([(120, 120), (50, 127)], {"_extend_kernel": 1}, {}),
    "mixed": (
        [(120, 120), *DECODE],
        {"_extend_kernel": 1, "_split_kernel": 1},
        {"_plan_kernel": 1},
    ),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "qwen3_moe"])
def test_a_layer_has_the_budgeted_number_of_launches(tmp_path, architecture, rows):
    """A dense layer's decode step has nine: its four products, attention, and four around them."""
    rows, attention, plan = ROWS[rows]
    few, many = (launched(tmp_path, architecture, layers, rows) for layers in (2, 4))
    gemma = architecture == "gemma2"
    layer = LAYERS.get(architecture, LAYER) | attention
    assert many - few == Counter({name: 2 * count for name, count in layer.items()})
    once = Counter(ONCE) + Counter(plan)
    if gemma:  # a plan with a window and one without, and the embedding's scale
        once += Counter(plan) + Counter({"mul_": 1})
    assert few - (many - few) == once


# The launches of a layer's decode step, on average over layers of all kinds. They may only
# decrease.
PER_LAYER = {"llama": 9, "qwen3_moe": 12, "deepseek_v3": 20, "qwen3_next": 16.75}
# Operations of torch: the sum of DeepSeek's shared expert and of the others.
EAGER = {"deepseek_v3": {"bmm": 4, "add": 2}}


@pytest.mark.parametrize("architecture", PER_LAYER)
def test_a_decode_step_launches_no_more_than_before(tmp_path, architecture):
    step = 4 if architecture == "qwen3_next" else 2  # layers, after which the kinds repeat
    few, many = (launched(tmp_path, architecture, layers, DECODE) for layers in (step, 2 * step))
    layers = many - few
    assert layers.total() / step == PER_LAYER[architecture]
    eager = {
        name: count
        for name, count in layers.items()
        if name != "product" and not name.endswith("_kernel")
    }
    assert eager == EAGER.get(architecture, {})


def test_a_chunk_on_latents_launches_one_kernel_more_for_keys_and_values(tmp_path):
    """The expansion replaces the products with queries and outputs. Decode rows beside the chunk
    keep theirs."""
    of_rows = {
        "chunk": ([(128, 128)], {"_expand_kernel": 1, "_extend_kernel": 1, "copy_": 1}),
        "few queries": ([(100, 128)], {"_extend_kernel": 1, "bmm": 2}),
        "mixed": (
            [(128, 128), *DECODE],
            {"_expand_kernel": 1, "_extend_kernel": 1, "_split_kernel": 1, "bmm": 2, "copy_": 2},
        ),
    }
    for rows, expected in of_rows.values():
        few, many = (launched(tmp_path, "deepseek_v3", layers, rows) for layers in (2, 3))
        names = ("_expand_kernel", "_extend_kernel", "_split_kernel", "bmm", "copy_")
        assert {name: n for name, n in (many - few).items() if name in names} == expected


def test_a_delta_net_launches_two_kernels_for_any_rows(tmp_path):
    """Prompts are computed in chunks, and rows that verify drafts token by token."""
    of_rows = {
        "decode": (DECODE, "_delta_rule_kernel"),
        "verify": ([(5, 40), (3, 30)], "_delta_rule_kernel"),
        "mixed": ([(40, 40), *DECODE], "delta_chunks_kernel"),
    }
    for rows, kernel in of_rows.values():
        counts = launched(tmp_path, "qwen3_5_text", 4, rows, torch.bfloat16)
        delta = {name: n for name, n in counts.items() if "delta" in name or "conv" in name}
        assert delta == {"_causal_conv_kernel": 3, kernel: 3}


# A decode step, rows with drafts, and a prompt.
SHAPES = (GraphShape(3, 3), GraphShape(12, 4, late=True), GraphShape(64, 3))


def check_shapes(model, drafts: bool = False) -> None:
    """Check the forwards of all shapes, and those of a drafter."""
    layout = KVLayout.of(model.spec.layers, PAGE_SIZE, model.dtype, None, model.spec.draft)
    pool, future = KVPool(layout, 1, CPU), torch.zeros(4, dtype=torch.int32)
    for shape in SHAPES:
        rows = padding(shape, layout.tables.num_tables, 8, layout.tables.state_pages)
        batch, _ = rows.to(CPU)
        late = LateStates() if shape.late else None
        with launching(Counter()):
            check_capturable(
                lambda batch=batch, late=late: model.forward(batch, pool, future, None, late), CPU
            )
    if drafts:
        drafter, count = model.drafter, torch.zeros(1, dtype=torch.int32)
        graphs = GraphDrafter(
            lambda batch: drafter.before(batch, pool),
            lambda one, vectors: drafter.advance(one, vectors, future, pool),
            drafter.logits,
        )
        columns = SamplingColumns(*map(torch.from_numpy, choice_padding(8, 8)[1:7]))
        graphs.allocate(batch, 8)
        with launching(Counter()):
            for work in (
                lambda: graphs.begin(batch, count),
                lambda: graphs.advance(batch, count),
                lambda: graphs.draw(batch, count, columns),
            ):
                check_capturable(work, CPU)


@pytest.mark.parametrize("architecture", NATIVE_ARCHITECTURES)
def test_a_step_has_no_operation_that_a_cuda_graph_does_not_support(tmp_path, architecture):
    check_shapes(load(make_checkpoint(tmp_path, architecture), CPU, torch.float32))


@pytest.mark.parametrize("method", ["mtp", "eagle", "eagle3", "draft_model"])
def test_a_drafter_has_no_operation_that_a_cuda_graph_does_not_support(tmp_path, method):
    if method == "mtp":
        directory, head = make_mtp(make_checkpoint(tmp_path / "model", "deepseek_v3")), ""
    else:
        directory = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=7)
        make = {"eagle": make_eagle, "eagle3": make_eagle3, "draft_model": make_draft}[method]
        head = str(make(tmp_path / "head", directory))
    method = "eagle" if method == "eagle3" else method
    speculation = SpeculativeConfig(method=method, draft_model=head)
    check_shapes(load(directory, CPU, torch.float32, speculation=speculation), drafts=True)
