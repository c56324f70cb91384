"""Launches steps on the forward stream and never waits for them.

Independent of request lifecycles. It reads the request table at launch, and takes tokens that the
CPU does not know yet from the future map.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from engine.adapters.adapters import AdapterBatch, AdapterManager, AdapterStep
from engine.batch.batch import ScheduleBatch
from engine.batch.forward import BatchBuilder, ForwardBatch
from engine.batch.table import SlotTable
from engine.batch.upload import divided, packed_bytes, upload
from engine.kv_cache.kv import HostPool, KVPool, swap_in, swap_out
from engine.models import Model
from engine.models.blocks.late_states import LateStates
from engine.runner.graphs import DecodeGraphs, Recorder
from engine.runner.launched import LaunchedStep, StepOutput
from engine.runner.rehearsal import decode_rehearsal, mixed_rehearsal, verify_rehearsal
from engine.runner.speculated import NOTHING, SettledDrafts, SpeculativeStep
from engine.runner.stream import DeviceStream, StreamEvent, made_on
from engine.sampling.composition import SamplingFeatures, SamplingInputs
from engine.sampling.pooling import nothing_sampled
from kernels.sampling.sample import SamplingColumns, sample


class FutureMap:
    """The last tokens by slot. Written after sampling and read at the start of the next forward,
    both on the forward stream.

    A step's input refers to a token that the CPU does not know as -(slot + 1).

    Attributes:
        tokens: int32 [num_slots].
        rejected: int32 [num_slots], number of rejected drafts. Valid for slots whose row had drafts
            in the previous step.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.rejected = torch.zeros(num_slots, dtype=torch.int32, device=device)

    @property
    def num_slots(self) -> int:
        return self.tokens.shape[0]

    def store(self, slots: Tensor, tokens: Tensor, rejected: Tensor | None = None) -> None:
        """Store tokens[i] as the last one of slots[i] (int64, distinct).

        A row without a valid token (a negative one) still takes part in a step that is launched
        before the CPU knows. It gets token 0, and its result is discarded.
        """
        self.tokens.index_copy_(0, slots, tokens.clamp(min=0))
        if rejected is not None:
            self.rejected.index_copy_(0, slots, rejected)


@dataclass(slots=True, eq=False)
class _Forward:
    """The forward of a step whose tokens are sampled later. Written and read by the forward stream.

    Attributes:
        late: pending state updates, if rows have drafts.
    """

    step: SettledDrafts
    sent: Sequence[Tensor]
    hidden: Tensor
    late: LateStates | None = None


class ModelRunner:
    """Runs a model over a pool for the requests of a table. Engine thread only.

    Args:
        features, adapters: of the requests of that table.
        recorder: of the graphs of decode steps. None: every step is launched kernel by kernel.
            Steps that have a row with an adapter always are.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        host_pool: HostPool,
        table: SlotTable,
        features: SamplingFeatures,
        adapters: AdapterManager,
        stream: DeviceStream,
        recorder: Recorder | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._host_pool = host_pool
        self._table = table
        self._builder = BatchBuilder(table)
        self._stream = stream
        self._future = made_on(stream, lambda: FutureMap(table.num_slots, model.device))
        self._features = features
        self._adapters = adapters
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            beside = features.rehearsals(table.num_slots, 0, model.spec)[0].tensors()
            self._graphs = made_on(
                stream,
                lambda: DecodeGraphs(
                    self._eager,
                    recorder,
                    model.device,
                    max_rows=table.num_slots,
                    num_tables=table.tables.num_tables,
                    max_pages=table.page_table[0].size,
                    state_pages=table.tables.state_pages,
                    beside_bytes=packed_bytes(beside),
                ),
            )

    def with_host_pool(self, host_pool: HostPool, recorder: Recorder | None) -> "ModelRunner":
        """Return a runner of the same model and requests over another host pool. The two must not
        be used at the same time."""
        beside = self._table, self._features, self._adapters, self._stream
        return ModelRunner(self._model, self._pool, host_pool, *beside, recorder)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Rows of the graphs for which `capture` is to be called, descending."""
        return self._graphs.sizes if self._graphs is not None else ()

    def capture(self, size: int) -> None:
        """Capture one of `graph_sizes`, and wait until it is done. Until then, steps that it would
        fit use a larger graph or none."""
        graphs = self._graphs
        assert graphs is not None
        self._enqueue(lambda: graphs.capture(size)).wait()

    def rehearse(self, num_tokens: int) -> None:
        """Warm up: run the largest forward and everything that may follow a forward, over dummy
        tokens, and wait.

        This compiles kernels and allocates the memory that they need.

        Args:
            num_tokens: of the largest forward, at least one for each slot.
        """
        num_slots, tables = self._future.num_slots, self._pool.layout.tables
        num_tables, state_pages = tables.num_tables, tables.state_pages
        mixed = mixed_rehearsal(num_tokens, num_slots, num_tables, tables.page_size, state_pages)
        decode = decode_rehearsal(num_slots, num_tables, state_pages=state_pages)
        steps = [(mixed, NOTHING, num_slots, num_tokens), (decode, NOTHING, num_slots, 0)]
        if num_slots > 1:  # otherwise there is no slot for a draft
            verify, told = verify_rehearsal(
                num_slots // 2, num_tables, tables.page_size, state_pages
            )
            speculated = SpeculativeStep.of(told, self._table)
            if self._model.drafter is not None:
                speculated = replace(speculated, to_guess=(len(told.slots),))
            steps.append((verify, speculated, told.num_tokens, 0))
        adapters = self._adapters.rehearsal(num_tokens)

        def work() -> None:
            for inputs, speculated, num_sampled, num_asked in steps:
                for each in self._features.rehearsals(num_sampled, num_asked, self._model.spec):
                    self._run(inputs, speculated, each, self._adapters.nothing, StepOutput())
            if adapters.tokens is not None:
                self._forward(mixed, NOTHING, SamplingInputs(), adapters)

        self._enqueue(work).wait()

    def launch(self, batch: ScheduleBatch) -> LaunchedStep:
        """Copy the step's data from the table, and enqueue the step.

        The order is: swap out, swap in, adapters, forward, sampling, and the copy of the tokens to
        host memory. A step without rows enqueues only the first two.
        """
        output = StepOutput()
        if not len(batch.slots):
            return LaunchedStep(batch, output, self._enqueue(lambda: self._swap(batch)))
        inputs, asked = self._builder.build(batch), self._features.build(batch)
        adapters = self._adapters.build(batch)
        speculated = SpeculativeStep.of(batch, self._table)
        if asked.late:
            return self._launch_forward(batch, inputs, speculated, asked, adapters, output)

        def work() -> None:
            self._swap(batch)
            self._run(inputs, speculated, asked, adapters, output)

        return LaunchedStep(batch, output, self._enqueue(work))

    def _launch_forward(
        self,
        batch: ScheduleBatch,
        inputs: ForwardBatch,
        speculated: SpeculativeStep,
        asked: SamplingInputs,
        adapters: AdapterBatch,
        output: StepOutput,
    ) -> LaunchedStep:
        """Launch only the forward. Sampling follows later, because it depends on the previous
        step."""
        done: list[_Forward] = []

        def work() -> None:
            self._swap(batch)
            done.append(self._forward(inputs, speculated, asked, adapters))

        def sample() -> StreamEvent:
            late = SamplingInputs(works=self._features.build_late(batch, asked.late))

            def work() -> None:
                sent = upload(late.tensors(), self._model.device)
                whole = replace(asked, works=asked.works + late.works)
                forward = replace(done[0], sent=[*done[0].sent, *sent])
                self._choose(forward, whole, output)

            return self._enqueue(work)

        return LaunchedStep(batch, output, self._enqueue(work), sample)

    def _enqueue(self, work: Callable[[], None]) -> StreamEvent:
        def enqueue() -> None:
            with torch.inference_mode():
                work()

        return self._stream.submit(enqueue)

    def _swap(self, batch: ScheduleBatch) -> None:
        if batch.swap_out is not None:
            swap_out(self._pool, self._host_pool, batch.swap_out)
        if batch.swap_in is not None:
            swap_in(self._pool, self._host_pool, batch.swap_in)

    def _run(
        self,
        inputs: ForwardBatch,
        speculated: SpeculativeStep,
        asked: SamplingInputs,
        adapters: AdapterBatch,
        output: StepOutput,
    ) -> None:
        self._choose(self._forward(inputs, speculated, asked, adapters), asked, output)

    def _choose(self, forward: _Forward, asked: SamplingInputs, output: StepOutput) -> None:
        step, sent, to_logits = forward.step, forward.sent, self._model.logits
        chosen = forward.hidden[: step.num_chosen]
        if asked.pooling is not None and asked.pooling.only:
            output.tokens = _to_host(nothing_sampled(chosen))
        else:
            tokens, told = asked.choose(to_logits(chosen), sent, step.early_chosen)
            self._keep(forward, tokens, output)
            output.told = {name: _to_host(tensor) for name, tensor in told.items()}
        if asked.prompt is not None:
            of_prompt = forward.hidden[step.num_chosen :][: len(asked.prompt.places)]
            told, sent = asked.prompt.run(to_logits, of_prompt, sent[0]), sent[1:]
            output.prompt = {name: _to_host(tensor) for name, tensor in told.items()}
        if asked.pooling is not None:
            parts = asked.pooling.run(self._model, forward.hidden, sent)
            output.pooled = [(rows, _to_host(values)) for rows, values in parts]

    def _keep(self, forward: _Forward, tokens: Tensor, output: StepOutput) -> None:
        """Store the tokens for the next step, and copy them to the host."""
        step, rejected = forward.step, None
        if step.verified is not None:
            verified = step.verified.judge(step.batch.token_ids, tokens)
            tokens, rejected = verified.newest, verified.rejected
            output.runs = _to_host(verified.tokens), _to_host(verified.counts)
            if forward.late is not None:
                forward.late.write(step.batch.states_after(verified.counts))
            if (drafter := self._model.drafter) is not None:
                drafter.go_on_from(step.batch, step.batch.sampled[verified.last], self._pool)
        self._future.store(step.batch.slots, tokens, rejected)
        output.tokens = _to_host(tokens)

    def _forward(
        self,
        inputs: ForwardBatch,
        speculated: SpeculativeStep,
        asked: SamplingInputs,
        adapters: AdapterBatch,
    ) -> _Forward:
        """Run the forward, and copy the tensors that go to the device with its inputs."""
        adapters.fill()
        beside = asked.tensors()
        if asked.places:
            inputs = inputs.wanting(torch.cat(asked.places))
        elif (
            self._graphs is not None
            and not speculated
            and adapters.tokens is None
            and (size := self._graphs.size_for(inputs))
        ):
            uploaded, sent, hidden = self._graphs.run(inputs, size, beside)
            return _Forward(SettledDrafts(uploaded), sent, hidden)
        parts = beside, speculated.tensors(), adapters.tensors()
        uploaded, sent = inputs.to(self._model.device, beside=[*chain(*parts)])
        of_rows, of_drafts, of_adapters = divided(sent, parts)
        page_size = self._pool.layout.page_size
        step = speculated.settled(uploaded, of_drafts, self._future.rejected, page_size)
        if speculated.to_guess:
            columns = asked.columns_of(of_rows, step.early_chosen)
            step = replace(step, batch=self._guessed(step, speculated.to_guess, columns))
        adapted = adapters.adapted(of_adapters)
        late = None if step.verified is None else LateStates()
        return _Forward(step, of_rows, self._eager(step.batch, adapted, late), late)

    def _guessed(
        self, step: SettledDrafts, num_rows: Sequence[int], columns: SamplingColumns | None
    ) -> ForwardBatch:
        """Return the batch with guessed drafts.

        Each draft is drawn with the same noise as the token that will be sampled in its place. From
        two similar distributions this mostly gives the same token.
        """
        drafter, verified = self._model.drafter, step.verified
        assert drafter is not None and verified is not None

        def draw(logits: Tensor, number: int) -> Tensor:
            places = verified.samples[: len(logits), number]
            return sample(logits, None if columns is None else columns.at(places))

        token_ids = drafter.guess(step.batch, num_rows, self._future.tokens, self._pool, draw)
        return replace(step.batch, token_ids=token_ids)

    def _eager(
        self,
        uploaded: ForwardBatch,
        adapted: AdapterStep | None = None,
        late: LateStates | None = None,
    ) -> Tensor:
        return self._model.forward(uploaded, self._pool, self._future.tokens, adapted, late)


def _to_host(tokens: Tensor) -> Tensor:
    """Copy to the host. From a device the copy is asynchronous, and valid after the stream has
    passed it."""
    if tokens.device.type == "cpu":
        return tokens
    host = torch.empty_like(tokens, device="cpu", pin_memory=True)
    return host.copy_(tokens, non_blocking=True)
