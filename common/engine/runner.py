"""Launches steps on the forward stream and never waits for them.

Knows nothing of requests' lives: it reads the request table at launch, and the tokens that the CPU
does not know yet from the future map.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.engine.batch import NOT_SAMPLED, BatchResult, ScheduleBatch
from common.engine.forward import BatchBuilder, ForwardBatch
from common.engine.future_map import FutureMap
from common.engine.kv import HostPool, KVPool, swap_in, swap_out
from common.engine.models import Model
from common.engine.penalties import PenaltyBatch, PenaltyCounts
from common.engine.stream import Event, Stream
from common.engine.table import RequestTable
from kernels.sampling import sample


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
        sampled = self._output.tokens.numpy()
        if len(sampled) == len(self._batch.slots):
            return BatchResult(sampled)
        tokens = np.full(len(self._batch.slots), NOT_SAMPLED, np.int32)
        tokens[self._batch.samples] = sampled
        return BatchResult(tokens)


class ModelRunner:
    """Runs a model over a pool for the requests of a table. `launch`: engine thread only."""

    def __init__(
        self, model: Model, pool: KVPool, host_pool: HostPool, table: RequestTable, stream: Stream
    ) -> None:
        self._model = model
        self._pool = pool
        self._host_pool = host_pool
        self._builder = BatchBuilder(table)
        self._stream = stream
        self._future = FutureMap(table.num_slots, model.device)
        self._penalties = PenaltyCounts(table, model.spec.vocabulary_size, model.device)

    def launch(self, batch: ScheduleBatch) -> LaunchedStep:
        """Copies what the step needs of the table and enqueues: swap out, swap in, forward,
        sampling, the copy of the tokens to host memory."""
        inputs = self._builder.build(batch)
        penalties = self._penalties.build(batch.slots[batch.samples], batch.ends[batch.samples])
        output = _Output()

        def work() -> None:
            output.tokens = self._run(batch, inputs, penalties)

        return LaunchedStep(batch, output, self._stream.submit(work))

    @torch.inference_mode()
    def _run(
        self, batch: ScheduleBatch, inputs: ForwardBatch, penalties: PenaltyBatch | None
    ) -> Tensor:
        if batch.swap_out is not None:
            swap_out(self._pool, self._host_pool, batch.swap_out)
        if batch.swap_in is not None:
            swap_in(self._pool, self._host_pool, batch.swap_in)
        inputs = inputs.to(self._model.device)
        logits = self._model.forward(inputs, self._pool, self._future.tokens)
        if penalties is not None:
            self._penalties.apply(penalties, logits)
        tokens = sample(logits, inputs.sampling)
        if penalties is not None:
            self._penalties.add(penalties, tokens)
        self._future.store(inputs.slots, tokens)
        return _to_host(tokens)


def _to_host(tokens: Tensor) -> Tensor:
    """Asynchronous from a device: valid once the stream is past it."""
    if tokens.device.type == "cpu":
        return tokens
    host = torch.empty_like(tokens, device="cpu", pin_memory=True)
    return host.copy_(tokens, non_blocking=True)
