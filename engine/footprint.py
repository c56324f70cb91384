"""Measurement of the GPU memory that serving needs in addition to weights and pages.

The result determines the size of the page pool. Only this process's allocator is asked. The free
memory of the whole device is not used, because another node may start on it at the same time.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.errors import ConfigError
from engine.adapters.adapters import AdapterBank, AdapterManager
from engine.adapters.library import AdapterCache
from engine.batch.table import SlotTable
from engine.kv_cache.kv import HostPool, KVPool
from engine.models import Model
from engine.ranks import Stage
from engine.runner.forwards import Forwards
from engine.runner.graphs import CudaRecorder
from engine.runner.runner import ModelRunner, make_runner
from engine.runner.staged import rehearse_stage
from engine.runner.stream import open_stream
from engine.sampling.composition import every_feature
from engine.sizing import EngineShape

# Driver memory per graph (some hundred launches and their arguments), in addition to torch's
# allocations. An upper bound that was not measured on a GPU yet: see docs/gpu.md.
DRIVER_BYTES_PER_GRAPH = 4 << 20
DRIVER_BYTES_PER_CHOICE = 1 << 19  # the same for a graph that chooses tokens, with ten launches
SEGMENT_BYTES = 2 << 20  # the smallest block that torch's allocator gets from the device


@dataclass(frozen=True, slots=True)
class MemoryFootprint:
    """Measured memory in bytes."""

    state: int  # permanent memory of a runner: counts for penalties, inputs of graphs
    forward: int  # the largest forward, and the sampling after it
    graphs: int

    @property
    def total(self) -> int:
        return self.state + self.forward + self.graphs


def measure_footprint(
    model: Model,
    shape: EngineShape,
    bank: AdapterBank,
    *,
    max_running: int,
    max_drafts: int,
    graphs: bool,
    stage: Stage | None = None,
) -> MemoryFootprint:
    """Run the largest forward and capture the largest graphs with a pool of one page, then release
    all their memory. The kernels stay compiled.

    Args:
        max_drafts: see SlotTable.
        stage: pipeline stage of this rank. The other stage measures at the same time.
    Raises:
        ConfigError: the memory is too small even for that. The error has the numbers.
    """
    device, layout = model.device, shape.layout
    free = torch.cuda.mem_get_info(device)[0]
    num_tokens = largest_forward(shape, max_running)
    stream = open_stream(device)

    def make() -> ModelRunner:
        table = SlotTable(
            max_running,
            shape.context_length,
            layout.page_size,
            layout.windows,
            layout.state_pages,
            max_drafts,
        )
        return make_runner(
            model,
            KVPool(layout, 1, device),
            HostPool(layout, 0, device),
            table,
            every_feature(table, model.spec.vocabulary_size, model.spec.eos_token_ids, device),
            AdapterManager(AdapterCache(0, 0), bank, table),
            stream,
            CudaRecorder() if graphs else None,
        )

    try:
        footprint = footprint_of(make, num_tokens, device, stage)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a forward of {num_tokens} tokens does not fit into the {free / 2**30:.2f} GiB that "
            f"the weights leave on {device}; lower engine.scheduler.chunked_prefill_tokens"
        ) from error
    finally:
        stream.close()
    gc.collect()
    torch.cuda.empty_cache()
    return footprint


def largest_forward(shape: EngineShape, max_running: int) -> int:
    """Return the tokens of the largest forward: prompt tokens, and one token per decode row."""
    return shape.prefill_tokens + max_running


def footprint_of(
    make_runner: Callable[[], ModelRunner],
    num_tokens: int,
    device: torch.device,
    stage: Stage | None = None,
) -> MemoryFootprint:
    """Return the memory of a runner, from its creation to its graphs. The runner is deleted
    afterwards."""
    before = _in_use(device)
    runner = make_runner()
    state = _in_use(device) - before
    if stage is None:
        runner.rehearse(num_tokens)
    else:
        assert isinstance(runner.forwards, Forwards)
        rehearse_stage(runner.builder.rehearsals, num_tokens, runner.forwards, stage)
    # Includes memory that the forward has freed, because the allocator keeps it for the next one.
    forward = torch.cuda.memory_reserved(device) - before - state
    # The largest graph allocates the memory that all graphs share. The largest choice of tokens
    # adds memory for logits. Each graph also needs some of its own.
    shapes = runner.graph_shapes
    choosing = [shape for shape in shapes if shape.chooses]
    taken = []
    measured = dict.fromkeys((*shapes[:2], *choosing[:1]))
    for shape in measured:
        before = _in_use(device)  # a capture also returns memory that the forward left
        runner.capture(shape)
        taken.append(max(0, _in_use(device) - before))
    # A shape with drafts may have four further graphs, with fewer launches.
    graphs = sum(taken) + DRIVER_BYTES_PER_GRAPH * sum(1 + 2 * shape.late for shape in shapes)
    graphs += DRIVER_BYTES_PER_CHOICE * len(choosing)
    for shape in shapes:
        if shape in measured:
            continue
        segments = -(-taken[1] * shape.tokens // (shapes[1].tokens * SEGMENT_BYTES))
        graphs += segments * SEGMENT_BYTES
    return MemoryFootprint(max(0, state), max(0, forward), graphs)


def _in_use(device: torch.device) -> int:
    """Return the bytes that this process's allocator holds and cannot release."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
