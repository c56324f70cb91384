"""Launches steps on the forward stream and never waits for them.

Knows nothing of requests' lives: it reads the request table at launch, and the tokens that the CPU
does not know yet from the future map.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from common.engine.features.penalties import PenaltyBatch, PenaltyCounts
from common.engine.memory.kv import HostPool, KVPool, swap_in, swap_out
from common.engine.models import Model
from common.engine.rows.batch import NOT_FINITE, NOT_SAMPLED, BatchResult, ScheduleBatch
from common.engine.rows.forward import BatchBuilder, ForwardBatch
from common.engine.rows.table import RequestTable
from common.engine.run.future_map import FutureMap
from common.engine.run.graphs import DecodeGraphs, Recorder
from common.engine.run.rehearsal import decode_rehearsal, mixed_rehearsal
from common.engine.run.stream import Event, Stream, made_on
from kernels.sampling import sample

_NOT_SAMPLED = np.array(NOT_SAMPLED, np.int32)


@dataclass(slots=True, eq=False)
class _Output:
    """Written by the forward stream, read once its event is done. Tokens in host memory."""

    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))


class LaunchedStep:
    """A forward on its way, and where its tokens will be."""

    def __init__(self, batch: ScheduleBatch, output: _Output, event: Event) -> None:
        self._batch = batch
        self._output = output
        self._event = event

    @property
    def batch(self) -> ScheduleBatch:
        return self._batch

    def result(self) -> BatchResult:
        self._event.wait()
        tokens, samples = self._output.tokens.numpy(), self._batch.samples
        if np.count_nonzero(samples) == len(samples):
            return BatchResult(tokens)
        return BatchResult(np.where(samples | (tokens == NOT_FINITE), tokens, _NOT_SAMPLED))


class ModelRunner:
    """Runs a model over a pool for the requests of a table. Engine thread only.

    Args:
        recorder: of the graphs of decode steps; None: every step is launched kernel by kernel.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        host_pool: HostPool,
        table: RequestTable,
        stream: Stream,
        recorder: Recorder | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._host_pool = host_pool
        self._builder = BatchBuilder(table)
        self._stream = stream
        self._future = made_on(stream, lambda: FutureMap(table.num_slots, model.device))
        self._penalties = PenaltyCounts(table, model.spec.vocabulary_size, model.device)
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            self._graphs = made_on(
                stream,
                lambda: DecodeGraphs(
                    self._eager,
                    recorder,
                    model.device,
                    max_rows=table.num_slots,
                    max_pages=table.page_table.shape[1],
                ),
            )

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Rows of the graphs that `capture` is to be called for, descending."""
        return self._graphs.sizes if self._graphs is not None else ()

    def capture(self, size: int) -> None:
        """Captures one of `graph_sizes`, and waits until it is done. Before that, steps that it
        would fit take a larger graph, or none."""
        graphs = self._graphs
        assert graphs is not None
        self._enqueue(lambda: graphs.capture(size)).wait()

    def rehearse(self, num_tokens: int) -> None:
        """Runs the largest forward there will be, and all that may follow a forward, over nobody's
        tokens, and waits for it: kernels get compiled, and the memory they need allocated.

        Args:
            num_tokens: of the largest forward, at least one for each slot.
        """
        num_slots = self._future.num_slots
        mixed = mixed_rehearsal(num_tokens, num_slots, self._pool.layout.page_size)
        choices = tuple(product((True, False), (self._penalties.rehearsal(), None)))

        def work() -> None:
            for inputs in (mixed, decode_rehearsal(num_slots)):
                uploaded, hidden = self._forward(inputs)
                greedy = replace(uploaded, sampling=None)
                for sampled, penalties in choices:
                    _to_host(self._sample(uploaded if sampled else greedy, hidden, penalties))

        self._enqueue(work).wait()

    def launch(self, batch: ScheduleBatch) -> LaunchedStep:
        """Copies what the step needs of the table and enqueues: swap out, swap in, forward,
        sampling, the copy of the tokens to host memory."""
        inputs = self._builder.build(batch)
        penalties = self._penalties.build(batch.slots, batch.ends, batch.samples)
        output = _Output()

        def work() -> None:
            output.tokens = self._run(batch, inputs, penalties)

        return LaunchedStep(batch, output, self._enqueue(work))

    def _enqueue(self, work: Callable[[], None]) -> Event:
        def enqueue() -> None:
            with torch.inference_mode():
                work()

        return self._stream.submit(enqueue)

    def _run(
        self, batch: ScheduleBatch, inputs: ForwardBatch, penalties: PenaltyBatch | None
    ) -> Tensor:
        if batch.swap_out is not None:
            swap_out(self._pool, self._host_pool, batch.swap_out)
        if batch.swap_in is not None:
            swap_in(self._pool, self._host_pool, batch.swap_in)
        uploaded, hidden = self._forward(inputs)
        tokens = self._sample(uploaded, hidden, penalties)
        return _to_host(tokens)

    def _forward(self, inputs: ForwardBatch) -> tuple[ForwardBatch, Tensor]:
        """The batch on the device, and the hidden states of its sampled tokens."""
        if self._graphs is not None and (size := self._graphs.size_for(inputs)):
            return self._graphs.run(inputs, size)
        uploaded = inputs.to(self._model.device)
        return uploaded, self._eager(uploaded)

    def _eager(self, uploaded: ForwardBatch) -> Tensor:
        return self._model.forward(uploaded, self._pool, self._future.tokens)

    def _sample(
        self, uploaded: ForwardBatch, hidden: Tensor, penalties: PenaltyBatch | None
    ) -> Tensor:
        logits = self._model.logits(hidden)
        if penalties is None:
            tokens = sample(logits, uploaded.sampling)
        else:
            penalties = penalties.to(self._model.device)
            logits = logits.float()
            self._penalties.apply(penalties, logits)
            tokens = sample(logits, uploaded.sampling)
            self._penalties.add(penalties, tokens)
        self._future.store(uploaded.slots, tokens)
        return tokens


def _to_host(tokens: Tensor) -> Tensor:
    """Asynchronous from a device: valid once the stream is past it."""
    if tokens.device.type == "cpu":
        return tokens
    host = torch.empty_like(tokens, device="cpu", pin_memory=True)
    return host.copy_(tokens, non_blocking=True)
