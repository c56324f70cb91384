"""Forwards: runs the steps of a model on the forward stream without waiting for them. It knows no
requests."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.adapters.adapters import AdapterBank, AdapterStep
from engine.batch.forward import ForwardBatch, HostBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.upload import HostColumn, divided, upload
from engine.batch.verified_rows import VerifiedRows
from engine.kv_cache.kv import HostPool, KVPool, swap_in, swap_out
from engine.models import Model, ModelSpec
from engine.models.blocks.layer import LateStates
from engine.models.decoder import SplitForward
from engine.models.drafting import DraftSteps, EagerDrafts, drawn, sample_places
from engine.runner.draft_graphs import GraphDrafter
from engine.runner.graphs import GraphModel, GraphSizes, StepGraphs
from engine.runner.step import SettledDrafts, Step, StepOutput
from engine.runner.stream import DeviceStream, StreamEvent, made_on
from engine.sampling.choice_graphs import Recorder
from engine.sampling.composition import SampledTokens
from engine.sampling.heads import HeadInputs, HiddenStates
from kernels.sampling.early_rows import move_early_rows
from kernels.sampling.sample import SamplingColumns, sample
from kernels.sampling.verify import verify_drafts

# Draws drafts, int32 [n], from the logits [n, any] of the samples at places int64 [n].
Draw: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class TokenSampling(Protocol):
    """The choice of a step's tokens. `sent` are its `columns` on the device."""

    def columns(self) -> Sequence[HostColumn]:
        """Return the columns that are uploaded together with the step's columns."""
        ...

    def parameters(self) -> Sequence[HostColumn] | None:
        """Return the sampling parameters in host memory, as in SamplingColumns. Empty if every row
        is greedy. None: the choice depends on more, or other ranks take part in it."""
        ...

    def draws(self, sent: Sequence[Tensor], early: Tensor | None) -> Draw:
        """Return the function that draws drafts. On the forward stream.

        Args:
            early: see HiddenStates.
        """
        ...

    def sample(self, states: HiddenStates, sent: Sequence[Tensor]) -> SampledTokens:
        """Choose the tokens. On the forward stream."""
        ...


class SharedSampling:
    """A choice in which other ranks take part. Base of TokenSampling."""

    def columns(self) -> Sequence[HostColumn]:
        return ()

    def parameters(self) -> None:
        return None


# Both take the sampling work, its columns to upload, and the destination of the results. The first
# one launches the sampling of a launched forward. The second one returns it as work of the forward
# stream.
SampleLater: TypeAlias = Callable[[TokenSampling, Sequence[HostColumn], StepOutput], StreamEvent]
SamplingWork: TypeAlias = Callable[
    [TokenSampling, Sequence[HostColumn], StepOutput], Callable[[], None]
]


@dataclass(frozen=True, slots=True)
class ForwardSizes:
    """Sizes of the largest decode step.

    Attributes:
        max_pages: pages of one row, in all page tables together.
        max_drafts: drafts of one row. 0: steps have none.
        sampling_bytes: bytes of the packed tensors of its sampling work.
    """

    num_slots: int
    max_pages: int
    max_drafts: int = 0
    sampling_bytes: int = 0


class FutureMap:
    """The last token of each slot. Written after sampling and read at the start of the next
    forward, both on the forward stream.

    A step refers to a token that the CPU does not know yet as -(slot + 1). Padding of graphs uses
    an additional slot, the last one.

    Attributes:
        tokens: int32 [num_slots + 1].
        rejected: int32 [num_slots + 1], number of rejected drafts. Valid for slots whose row had
            drafts in the previous step.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.rejected = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Store tokens[i] as the last token of slots[i] (int64, distinct except for padding).

        A row without a valid token (a negative one) is still part of the next step, because that is
        launched before the CPU knows. The row gets token 0, and its result is discarded.
        """
        self.tokens.index_copy_(0, slots, tokens.clamp(min=0))


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """A forward whose tokens are sampled later. Used only on the forward stream.

    Attributes:
        sent: tensors of the sampling work, on the device.
        late: pending state updates, if rows have drafts and there is no graph.
        graph: shape of the graph that has computed it.
    """

    step: SettledDrafts
    states: HiddenStates
    sent: Sequence[Tensor]
    late: LateStates | None = None
    graph: GraphShape | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A step on the device before its forward. Used only on the forward stream.

    Attributes:
        sent: tensors of the sampling work.
        graph: shape of the graph that computes the forward. None: no graph does.
        guessed: whether the device has drawn its drafts.
    """

    step: SettledDrafts
    heads: HeadInputs
    sent: Sequence[Tensor]
    adapted: AdapterStep | None = None
    graph: GraphShape | None = None
    guessed: bool = False


# Begins a forward whose layers are computed in groups. Has the arguments of Model.forward.
BeginLayers: TypeAlias = Callable[[ForwardBatch, KVPool, Tensor, AdapterStep | None], SplitForward]


@dataclass(slots=True, eq=False)
class GroupedForward:
    """A step whose layers are computed in groups. Its data between two groups is used only on the
    forward stream."""

    step: Step
    sampling: TokenSampling
    begin: BeginLayers
    begun: tuple[_Prepared, SplitForward] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BegunStep:
    """A launched forward whose tokens are sampled later.

    Attributes:
        sample: launches the sampling.
        token_ids: waits for the tokens of the step in host memory, which may be known before the
            forward has ended. None: the device drafts none of them.
    """

    event: StreamEvent
    sample: SampleLater
    token_ids: Callable[[], Tensor] | None = None


class Forwards:
    """The forwards of a model over one page pool. Engine thread only.

    Args:
        bank: LoRA adapters of the steps.
        recorder: records the CUDA graphs of steps. None: every step is launched kernel by kernel.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        host_pool: HostPool,
        bank: AdapterBank,
        stream: DeviceStream,
        sizes: ForwardSizes,
        recorder: Recorder | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._host_pool = host_pool
        self._bank = bank
        self._stream = stream
        self._sizes = sizes
        self._future = made_on(stream, lambda: FutureMap(sizes.num_slots, model.device))
        self._graphs = None if recorder is None else self._made_graphs(recorder)

    def with_host_pool(self, host_pool: HostPool, recorder: Recorder | None) -> "Forwards":
        """Return forwards of the same model over another host pool. Use only one of the two at a
        time."""
        beside = self._bank, self._stream, self._sizes
        return Forwards(self._model, self._pool, host_pool, *beside, recorder)

    def with_same_graphs(self, host_pool: HostPool) -> "Forwards":
        """Return these forwards, with the same tokens and graphs, over another host pool."""
        changed = copy(self)
        changed._host_pool = host_pool
        return changed

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def graph_shapes(self) -> tuple[GraphShape, ...]:
        """Shapes of the graphs to `capture`, in descending order."""
        return self._graphs.shapes if self._graphs is not None else ()

    def graph_of(self, rows: HostBatch, *, late: bool, adapted: bool) -> GraphShape | None:
        """Return the shape of the smallest graph for a step. None: no captured graph fits.

        Args:
            late: whether rows have drafts.
            adapted: whether tokens have adapters.
        """
        graphs = self._graphs
        return None if graphs is None else graphs.shape_for(rows, late=late, adapted=adapted)

    def capture(self, shape: GraphShape, *, choice: bool = True) -> None:
        """Capture one of `graph_shapes`, and wait until it is done. Until then, steps of this shape
        use a larger graph or none.

        Args:
            choice: whether this rank alone chooses tokens, so that the choice can be part of
                graphs.
        """
        graphs = self._graphs
        assert graphs is not None
        self.enqueue(lambda: graphs.capture(shape, choice=choice)).wait()

    def launch(self, step: Step, sampling: TokenSampling, output: StepOutput) -> StreamEvent:
        """Enqueue a step.

        The order is: swap out, swap in, adapters, forward, sampling, and the copy of the tokens to
        host memory. A step without rows has only the swaps.
        """

        def work() -> None:
            self._swap(step)
            if step.rows is not None and not self._replayed(step, step.rows, sampling, output):
                self._sample(self._forward(step, step.rows, sampling), sampling, output)

        return self.enqueue(work)

    def _replayed(
        self, step: Step, rows: HostBatch, sampling: TokenSampling, output: StepOutput
    ) -> bool:
        """Run a step by graphs alone, including its drafts and the choice of its tokens. Return
        False, without any effect, if that is not possible."""
        shape, speculated = step.graph, step.speculated
        if shape is None:
            return False
        graphs, parameters = self._graphs, sampling.parameters()
        assert graphs is not None
        if parameters is None or not graphs.chooses(len(rows.sampled)):
            return False
        if step.adapters is not None:
            step.adapters.fill(self._bank)
        graphs.send(shape, rows, step.adapter_columns, parameters, speculated)
        tokens = graphs.run(shape, len(rows.sampled), speculated.num_guessed)
        if speculated.most:
            output.verified = _copied_to_host(graphs.verified(len(rows.slots)))
        else:
            output.tokens = _copied_to_host(tokens)
        return True

    def launch_forward(self, step: Step, sampling: TokenSampling) -> BegunStep:
        """Enqueue the forward of a step with rows, without its sampling."""
        if step.speculated.num_guessed:
            return self._launch_guessed(step, sampling)
        event, sampling_work = self.begin(step, sampling)
        return BegunStep(event, lambda *inputs: self.enqueue(sampling_work(*inputs)))

    def _launch_guessed(self, step: Step, sampling: TokenSampling) -> BegunStep:
        """Enqueue a step whose drafts reach the host before its forward has ended."""
        rows, prepared, done = step.rows, list[_Prepared](), list[_Forward]()
        token_ids = list[Tensor]()
        assert rows is not None

        def prepare() -> None:
            self._swap(step)
            prepared.append(self._prepared(step, rows, sampling))
            token_ids.append(_to_host(prepared[0].step.batch.token_ids))

        guessed = self.enqueue(prepare)
        event = self.enqueue(lambda: done.append(self._computed(prepared[0])))

        def guessed_ids() -> Tensor:
            guessed.wait()
            return token_ids[0]

        sampling_work = self._sampling_of(done)
        return BegunStep(event, lambda *inputs: self.enqueue(sampling_work(*inputs)), guessed_ids)

    def launch_group(self, forward: GroupedForward, past: int, copies: Step) -> StreamEvent:
        """Enqueue the layers up to number `past` - 1 of a forward, but not its last layers.

        Args:
            copies: a step without rows, whose copies precede the layers.
        """

        def work() -> None:
            self._swap(copies)
            self._advance(forward, past)

        return self.enqueue(work)

    def launch_last_group(
        self, forward: GroupedForward, past: int, copies: Step, output: StepOutput
    ) -> StreamEvent:
        """Enqueue the last layers of a forward, and the sampling of the step."""

        def work() -> None:
            self._swap(copies)
            prepared, layers = self._advance(forward, past)
            self._sample(self._ran(prepared, layers.complete()), forward.sampling, output)

        return self.enqueue(work)

    def _advance(self, forward: GroupedForward, past: int) -> tuple[_Prepared, SplitForward]:
        if forward.begun is None:
            assert forward.step.rows is not None
            prepared = self._prepared(forward.step, forward.step.rows, forward.sampling)
            inputs = prepared.step.batch, self._pool, self._future.tokens, prepared.adapted
            forward.begun = prepared, forward.begin(*inputs)
        forward.begun[1].advance(past)
        return forward.begun

    def begin(self, step: Step, sampling: TokenSampling) -> tuple[StreamEvent, SamplingWork]:
        """Enqueue the forward of a step with rows. Return its sampling as work for the stream."""
        rows, done = step.rows, list[_Forward]()
        assert rows is not None

        def work() -> None:
            self._swap(step)
            done.append(self._forward(step, rows, sampling))

        return self.enqueue(work), self._sampling_of(done)

    def _sampling_of(self, done: Sequence[_Forward]) -> SamplingWork:
        """Return the sampling of a forward. The forward is in `done` when the work runs."""

        def sampling_work(
            whole: TokenSampling, added: Sequence[HostColumn], output: StepOutput
        ) -> Callable[[], None]:
            def work() -> None:
                sent = [*done[0].sent, *upload(added, self._model.device)]
                self._sample(replace(done[0], sent=sent), whole, output)

            return work

        return sampling_work

    def enqueue(self, work: Callable[[], None]) -> StreamEvent:
        """Enqueue work on the forward stream."""

        def enqueue() -> None:
            with torch.inference_mode():
                work()

        return self._stream.submit(enqueue)

    def _made_graphs(self, recorder: Recorder) -> StepGraphs:
        sizes, tables = self._sizes, self._pool.layout.tables
        of_steps = GraphSizes(
            max_rows=sizes.num_slots,
            num_tables=tables.num_tables,
            max_pages=sizes.max_pages,
            hidden_size=self._model.spec.hidden_size,
            max_drafts=sizes.max_drafts,
            state_pages=tables.state_pages,
            late=sizes.max_drafts > 0
            and (tables.state_pages > 0 or self._model.drafter is not None),
            beside_bytes=sizes.sampling_bytes,
        )
        pool, future, drafter, of_drafts = self._pool, self._future, self._model.drafter, None
        if drafter is not None:
            of_drafts = GraphDrafter(
                lambda batch: drafter.before(batch, pool),
                lambda one, vectors: drafter.advance(one, vectors, future.tokens, pool),
                drafter.logits,
            )
        graph_model = GraphModel(
            self._eager,
            self._chosen,
            lambda rows, inputs, sampled: move_early_rows(
                rows, inputs, future.rejected, sampled, tables.page_size
            ),
            lambda rows, tokens, verified: verify_drafts(
                rows, tokens, future.tokens, future.rejected, verified
            ),
            self._model.device,
            self._model.dtype,
        )
        made = graph_model, recorder, self._bank, of_steps, of_drafts
        return made_on(self._stream, lambda: StepGraphs(*made))

    def _chosen(self, hidden: Tensor, columns: SamplingColumns, slots: Tensor) -> Tensor:
        """Choose tokens and store them for the next step."""
        tokens = sample(self._model.logits(hidden), columns)
        self._future.store(slots, tokens)
        return tokens

    def _swap(self, step: Step) -> None:
        if step.swap_out is not None:
            swap_out(self._pool, self._host_pool, step.swap_out)
        if step.swap_in is not None:
            swap_in(self._pool, self._host_pool, step.swap_in)

    def _forward(self, step: Step, rows: HostBatch, sampling: TokenSampling) -> _Forward:
        """Run the forward. Upload the sampling tensors together with its inputs."""
        return self._computed(self._prepared(step, rows, sampling))

    def _prepared(self, step: Step, rows: HostBatch, sampling: TokenSampling) -> _Prepared:
        """Copy the inputs of a step to the device, with the real start and drafts of each row."""
        speculated, adapters, heads = step.speculated, step.adapters, step.heads
        if adapters is not None:
            adapters.fill(self._bank)
        parts = [sampling.columns(), speculated.columns(len(rows.slots)), heads.columns()]
        if step.graph is None:
            parts.append(step.adapter_columns)
            uploaded, sent = rows.to(self._model.device, [*chain(*parts)])
            uploaded = uploaded.movable() if speculated.early else uploaded
        else:
            assert self._graphs is not None
            uploaded, sent = self._graphs.upload(
                step.graph, rows, step.adapter_columns, [*chain(*parts)]
            )
        of_rows, of_drafts, of_heads, *of_adapters = divided(sent, parts)
        page_size = self._pool.layout.page_size
        settled = speculated.settled(uploaded, of_drafts, self._future.rejected, page_size)
        if speculated.num_guessed:
            draw = sampling.draws(of_rows, settled.early)
            settled = self._guessed(settled, step, rows, draw)
        on_device = settled, heads.on_device(of_heads), of_rows
        if step.graph is not None:
            return _Prepared(*on_device, graph=step.graph)
        adapted = None if adapters is None else adapters.adapted(self._bank, *of_adapters)
        return _Prepared(*on_device, adapted, guessed=speculated.num_guessed > 0)

    def _computed(self, prepared: _Prepared) -> _Forward:
        batch = prepared.step.batch
        if prepared.graph is not None:
            assert self._graphs is not None
            return self._ran(prepared, self._graphs.replay(prepared.graph, len(batch.sampled)))
        has_drafts = prepared.step.verified is not None
        late = LateStates(guessed=prepared.guessed) if has_drafts else None
        return self._ran(prepared, self._eager(batch, prepared.adapted, late), late)

    def _ran(self, prepared: _Prepared, hidden: Tensor, late: LateStates | None = None) -> _Forward:
        settled, heads = prepared.step, prepared.heads
        sampled, early = settled.batch.sampled, settled.early
        states = HiddenStates(self._model, heads, hidden, sampled, settled.num_chosen, early)
        return _Forward(settled, states, prepared.sent, late, prepared.graph)

    def _guessed(
        self, settled: SettledDrafts, step: Step, rows: HostBatch, draw: Draw
    ) -> SettledDrafts:
        """Return the step with drafts that the device has drawn."""
        drafter, batch = self._model.drafter, settled.batch
        assert drafter is not None

        def draw_of(logits: Tensor, number: int) -> Tensor:
            first = torch.arange(len(logits), device=logits.device)
            return draw(logits, sample_places(batch, first, len(batch.slots), number))

        forwards: DraftSteps
        if step.graph is None:
            forwards = EagerDrafts(drafter, batch, self._future.tokens, self._pool)
        else:
            assert self._graphs is not None
            forwards = self._graphs.drafts(step.graph, batch)
        drafts = np.diff(rows.query_starts) - 1
        num_rows = [int((drafts > n).sum()) for n in range(step.speculated.num_guessed)]
        token_ids = drawn(forwards, batch, num_rows, draw_of, drafter.logits)
        return replace(settled, batch=msgspec.structs.replace(batch, token_ids=token_ids))

    def _eager(
        self,
        uploaded: ForwardBatch,
        adapted: AdapterStep | None = None,
        late: LateStates | None = None,
    ) -> Tensor:
        return self._model.forward(uploaded, self._pool, self._future.tokens, adapted, late)

    def _sample(self, forward: _Forward, sampling: TokenSampling, output: StepOutput) -> None:
        """Choose the tokens, verify drafts, store the newest tokens for the next step, and copy
        everything to the host."""
        states, verified = forward.states, forward.step.verified
        sampled = sampling.sample(states, forward.sent)
        tokens = sampled.tokens
        if not states.inputs.chosen:
            output.tokens = _to_host(tokens)
        elif verified is not None:
            self._verify(forward, verified, tokens, output)
        else:
            self._future.store(forward.step.batch.slots, tokens)
            output.tokens = _to_host(tokens)
        output.logprobs = _all_to_host(sampled.logprobs)
        output.prompt = _all_to_host(sampled.prompt)
        output.pooled = [(rows, _to_host(values)) for rows, values in sampled.pooled]

    def _verify(
        self, forward: _Forward, rows: VerifiedRows, sampled: Tensor, output: StepOutput
    ) -> None:
        """Verify drafts, and store the newest token of each row for the next step."""
        batch, future = forward.step.batch, self._future
        verified = rows.verify(batch, sampled, future.tokens, future.rejected)
        output.verified = _to_host(verified)
        counts, late = verified[:, 0].contiguous(), forward.late
        if forward.graph is not None:
            assert self._graphs is not None
            self._graphs.update(forward.graph, counts)
        if late is not None and late.has_layers:
            num_drafted = len(batch.token_ids) - batch.num_decodes
            late.write(batch.states_after(counts), num_drafted)
        if late is not None and late.has_drafters:
            late.continue_from((batch.query_starts[:-1] + counts).long() - 1)  # last accepted


def _all_to_host(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _to_host(column) for name, column in columns.items()}


def _to_host(tokens: Tensor) -> Tensor:
    """Copy to the host. A copy from a device is asynchronous, and valid once the stream has passed
    it."""
    if tokens.device.type == "cpu":
        return tokens
    return _copied_to_host(tokens)


def _copied_to_host(tokens: Tensor) -> Tensor:
    """Copy to other host memory, see `_to_host`."""
    pinned = tokens.device.type == "cuda"
    host = torch.empty_like(tokens, device="cpu", pin_memory=pinned)
    return host.copy_(tokens, non_blocking=True)
