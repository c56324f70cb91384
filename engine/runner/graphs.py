"""CUDA graphs of decode steps: one per padded number of rows, captured once and replayed.

A graph contains only the model's forward. Logits and sampling are launched while the graph runs. So
a graph needs no memory for logits and is independent of sampling.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from common.errors import EngineFault
from engine.batch.forward import ForwardBatch
from engine.runner.host_waits import Uncapturable, check_capturable
from engine.runner.rehearsal import decode_rehearsal

log = logging.getLogger(__name__)

Forward: TypeAlias = Callable[[ForwardBatch], Tensor]


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Repeat the work on the current stream: the same launches on the same addresses."""
        ...


class Recorder(Protocol):
    """Records the launches of `work`. `work` has run before, so that nothing is compiled during
    capture."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Return the graph and the result of `work`, which every replay writes again.

        Raises:
            Uncapturable: some operation of `work` cannot be part of a graph.
            RuntimeError: the capture failed.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, because they are replayed one after the
    other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        work()
        check_capturable(work, torch.device("cuda"))
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during capture without affecting this graph.
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            output = work()
        return graph, output


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    graph: Graph
    hidden: Tensor  # [rows, hidden], of the latest replay


class DecodeGraphs:
    """The graphs of decode steps. Forward stream only."""

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder,
        device: torch.device,
        *,
        max_rows: int,
        num_tables: int,
        max_pages: int,
        state_pages: int = 0,
        beside_bytes: int = 0,
    ) -> None:
        """Allocate the inputs that all graphs share.

        Args:
            num_tables: page tables of every row.
            max_pages: of one row, in all tables together.
            state_pages: further pages of one row, for states.
            beside_bytes: space for tensors that are copied to the device together with a step's
                inputs.
        """
        self._forward = forward
        self._recorder = recorder
        self._device = device
        self._num_tables = num_tables
        self._max_pages = max_pages
        self._state_pages = state_pages
        self._sizes = ladder(max_rows)
        self._graphs: dict[int, _Recorded] = {}
        self._impossible = False
        # Every graph reads its inputs here, and every step's inputs are copied here.
        num_bytes = self._rehearsal(max_rows).packed_bytes + beside_bytes
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the graphs to capture, descending. The largest comes first, so that the others
        reuse its memory."""
        return self._sizes[::-1]

    def capture(self, size: int) -> None:
        """Capture the graph for `size` rows, over a batch of padding.

        A model that waits for the device in a forward gets no graphs, which is logged once.

        Raises:
            OutOfMemoryError: there is not enough memory for the graph.
            EngineFault: the capture failed. The allocator of torch does not recover from that, so
                nothing else may run in this process.
        """
        if self._impossible:
            return
        inputs = self._rehearsal(size)
        batch, _ = inputs.to(self._device, self._inputs)
        try:
            graph, hidden = self._recorder(lambda: self._forward(batch))
        except Uncapturable as error:
            self._impossible = True
            self._graphs.clear()
            log.warning("decode steps run without CUDA graphs: the model uses %s", error)
            return
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise EngineFault(
                f"the CUDA graph of a decode step of {size} rows could not be captured ({reason}), "
                "and torch cannot continue after that; start with --no-engine.cuda-graphs"
            ) from error
        self._graphs[size] = _Recorded(graph, hidden)

    def _rehearsal(self, num_rows: int) -> ForwardBatch:
        num_pages = num_rows * self._max_pages
        return decode_rehearsal(num_rows, self._num_tables, num_pages, self._state_pages)

    def size_for(self, batch: ForwardBatch) -> int:
        """Return the rows of the smallest graph for this step, or 0 if no graph fits."""
        rows = batch.num_rows
        if batch.num_decodes != rows or batch.seen:  # a graph has no images or embeddings
            return 0
        return next((size for size in self._sizes if rows <= size and size in self._graphs), 0)

    def run(
        self, batch: ForwardBatch, size: int, beside: Sequence[Tensor]
    ) -> tuple[ForwardBatch, Sequence[Tensor], Tensor]:
        """Replay a graph. Return the padded batch and the additional tensors, both on the device,
        and the hidden states of the batch's own rows. All of it is valid until the next `run`."""
        recorded = self._graphs[size]
        uploaded, sent = batch.padded(size).to(self._device, self._inputs, beside)
        recorded.graph.replay()
        return uploaded, sent, recorded.hidden[: batch.num_rows]


def ladder(max_rows: int) -> tuple[int, ...]:
    """Return the sizes of graphs, ascending. A step of n rows is padded by at most n / 8, or to
    8."""
    sizes = [1, 2, 4]
    size, step = 8, 8
    while size < max_rows:
        sizes.append(size)
        size += step
        if size % (8 * step) == 0:
            step = size // 8
    return (*(size for size in sizes if size < max_rows), max_rows)
