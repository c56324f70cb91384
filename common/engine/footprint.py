"""What serving takes of a GPU besides weights and pages, measured before the pool is sized."""

import gc
from dataclasses import dataclass

import torch

from common.engine.memory.kv import HostPool, KVPool
from common.engine.models import Model
from common.engine.rows.table import RequestTable
from common.engine.run.graphs import CudaRecorder
from common.engine.run.runner import ModelRunner
from common.engine.run.stream import open_stream
from common.engine.sizing import EngineShape
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes."""

    forward: int  # of the largest forward, and the sampling after it
    graphs: int

    @property
    def total(self) -> int:
        return self.forward + self.graphs


def measure_footprint(
    model: Model, shape: EngineShape, *, max_running: int, graphs: bool
) -> Footprint:
    """Runs the largest forward and captures the two largest graphs over a pool of one page, and
    gives all their memory back. The kernels stay compiled.

    Raises:
        ConfigError: with the numbers, where there is not even room for that.
    """
    device = model.device
    free = torch.cuda.mem_get_info(device)[0]
    num_tokens = largest_forward(shape, max_running)
    try:
        footprint = _measure(model, shape, num_tokens, max_running, graphs=graphs)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a forward of {num_tokens} tokens does not fit into the {free / 2**30:.2f} GiB that "
            f"the weights leave on {device}; engine.scheduler.chunk_tokens makes it smaller"
        ) from error
    gc.collect()
    torch.cuda.empty_cache()
    return footprint


def largest_forward(shape: EngineShape, max_running: int) -> int:
    """Tokens: a chunk, beside which decode rows may ride."""
    return shape.chunk_tokens + max_running


def _measure(
    model: Model, shape: EngineShape, num_tokens: int, max_running: int, *, graphs: bool
) -> Footprint:
    device, layout = model.device, shape.layout
    stream = open_stream(device)
    runner = ModelRunner(
        model,
        KVPool(layout, 1, device),
        HostPool(layout, 0, device),
        RequestTable(max_running, shape.context_length, layout.page_size),
        stream,
        CudaRecorder() if graphs else None,
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    runner.rehearse(num_tokens)
    forward = torch.cuda.memory_reserved(device) - before
    # The largest graph brings the memory that all of them share; each takes some of its own.
    taken = [0, 0]
    for place, size in enumerate(runner.graph_sizes[:2]):
        free = torch.cuda.mem_get_info(device)[0]
        runner.capture(size)
        taken[place] = free - torch.cuda.mem_get_info(device)[0]
    stream.close()
    return Footprint(forward, taken[0] + taken[1] * max(0, len(runner.graph_sizes) - 1))
