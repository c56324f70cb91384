"""The runner launches the scheduler's decisions: it builds a step from the slot table, enqueues it
with its sampling, and returns the launched step, which waits for its result."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np
from torch import Tensor

from engine.adapters.adapters import AdapterManager
from engine.batch.batch import (
    NOT_FINITE,
    NOT_SAMPLED,
    AcceptedRuns,
    BatchResult,
    Ints,
    LaunchedBatch,
    RowLogprobRequest,
    ScheduleBatch,
)
from engine.batch.forward import BatchBuilder, HostBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.table import SlotTable
from engine.batch.upload import packed_bytes
from engine.batch.verified_rows import standing
from engine.kv_cache.kv import HostPool, KVPool
from engine.models import Model
from engine.models.spec import ModelSpec
from engine.runner.forwards import BeginLayers, Forwards, ForwardSizes, GroupedForward
from engine.runner.ranked import LeadingForwards
from engine.runner.rehearsal import mixed_rehearsal, padding, verify_rehearsal
from engine.runner.step import NOTHING, SpeculativeStep, Step, StepOutput
from engine.runner.stream import DeviceStream, StreamEvent
from engine.sampling.choice_graphs import Recorder
from engine.sampling.composition import NOTHING_ASKED, SamplingFeatures, SamplingInputs
from engine.sampling.heads import HeadInputs
from engine.sampling.pooling import of_rows

_NOT_SAMPLED = np.array(NOT_SAMPLED, np.int32)
# Prompt lengths at which attention splits the keys, with few and with many queries per part.
SHORT_PROMPTS = (2, 20)


class GraphOf(Protocol):
    def __call__(self, rows: HostBatch, *, late: bool, adapted: bool) -> GraphShape | None: ...


class StepBuilder:
    """Builds the steps of an engine from the requests of its table. Engine thread only.

    Args:
        features, adapters: for the requests of the table.
        axial_images: see RowImages.
    """

    def __init__(
        self,
        table: SlotTable,
        features: SamplingFeatures,
        adapters: AdapterManager,
        *,
        axial_images: bool = False,
    ) -> None:
        self._table = table
        self._rows = BatchBuilder(table, axial_images=axial_images)
        self._features = features
        self._adapters = adapters if adapters.bank.num_slots else None

    def sizes(self, spec: ModelSpec) -> ForwardSizes:
        """Return the sizes of the largest steps of a model."""
        num_slots, max_pages = self._table.num_slots, self._table.page_table[0].size
        sampling = self._features.rehearsals(num_slots, 0, spec)
        num_bytes = packed_bytes(sampling[0].columns()) if sampling else 0
        return ForwardSizes(num_slots, max_pages, self._table.max_drafts, num_bytes)

    def build(
        self, batch: ScheduleBatch, graph_of: GraphOf | None = None
    ) -> tuple[Step, SamplingInputs]:
        """Build a step when it is launched, and the sampling of its tokens. All inputs are copied.

        Args:
            graph_of: returns the shape of the captured graph for a step, see Forwards. None: the
                step has no graph.
        """
        if not len(batch.slots):
            return Step(swap_out=batch.swap_out, swap_in=batch.swap_in), NOTHING_ASKED
        rows, sampling = self._rows.build(batch), self._features.build(batch)
        adapters = None if self._adapters is None else self._adapters.build(batch)
        speculated = SpeculativeStep.of(batch, self._table, rows)
        if places := sampling.places:
            rows = rows.wanting(places)
        late = speculated.most > 0
        adapted = adapters is not None and adapters.tokens is not None
        graph = None if graph_of is None else graph_of(rows, late=late, adapted=adapted)
        copies = batch.swap_out, batch.swap_in
        return Step(rows, speculated, adapters, sampling.heads, graph, *copies), sampling

    def note_drafts(self, batch: ScheduleBatch, token_ids: Ints) -> None:
        """Write drafts of the device to the table, after the tokens that are known when the
        previous step has ended.

        Args:
            token_ids: all tokens of the step.
        """
        rows, indices = batch.before_last()
        counts, numbers = batch.ends - batch.starts, indices - batch.starts[rows]
        drafts = token_ids[(np.cumsum(counts) - counts)[rows] + numbers + 1]
        slots = batch.slots[rows]
        self._table.tokens[slots, self._table.known[slots] + numbers] = drafts

    def build_late(self, batch: ScheduleBatch, sampling: SamplingInputs) -> SamplingInputs:
        """Return the part of the sampling that had to wait for the previous step."""
        return SamplingInputs(works=self._features.build_late(batch, sampling.late))

    def rehearsals(self, num_tokens: int, spec: ModelSpec) -> Iterator[tuple[Step, SamplingInputs]]:
        """Yield the largest steps of a model, over dummy tokens, for warmup. They write no page.
        `num_tokens`: see ModelRunner.rehearse."""
        num_slots, tables = self._table.num_slots, self._table.tables
        num_tables, state_pages = tables.num_tables, tables.state_pages
        mixed = mixed_rehearsal(num_tokens, num_slots, num_tables, tables.page_size, state_pages)
        decode = padding(GraphShape(num_slots, num_slots), num_tables, state_pages=state_pages)
        for sampling in self._features.rehearsals(num_slots, num_tokens, spec):
            yield _rehearsal(mixed, sampling), sampling
        for sampling in self._features.rehearsals(num_slots, 0, spec):
            yield _rehearsal(decode, sampling), sampling
        # A chunk after a long prefix, whose latents are not expanded.
        over_latents = msgspec.structs.replace(mixed, extends=())
        yield Step(over_latents, heads=HeadInputs(chosen=False)), NOTHING_ASKED
        for count in SHORT_PROMPTS:
            short = mixed_rehearsal(count, 1, num_tables, tables.page_size, state_pages)
            yield Step(short, heads=HeadInputs(chosen=False)), NOTHING_ASKED
        if num_slots > 1:  # otherwise there is no slot for a draft
            verify, batch = verify_rehearsal(
                num_slots // 2, num_tables, tables.page_size, state_pages
            )
            speculated = SpeculativeStep.of(batch, self._table, verify)
            if spec.draft is not None:
                speculated = msgspec.structs.replace(speculated, num_guessed=1)
            for sampling in self._features.rehearsals(batch.num_tokens, 0, spec):
                yield _rehearsal(verify, sampling, speculated), sampling
        adapters = None if self._adapters is None else self._adapters.rehearsal(num_tokens)
        if adapters is not None:
            yield Step(mixed, adapters=adapters, heads=HeadInputs(chosen=False)), NOTHING_ASKED


class LaunchedStep:
    """A launched forward and the source of its tokens.

    Args:
        later: launches the sampling, if some rows could not be sampled at launch.
    """

    def __init__(
        self,
        batch: ScheduleBatch,
        output: StepOutput,
        event: StreamEvent,
        later: Callable[[], StreamEvent] | None = None,
    ) -> None:
        self._batch = batch
        self._output = output
        self._events = [event]
        self._later = later

    @property
    def batch(self) -> ScheduleBatch:
        return self._batch

    def sample(self) -> None:
        if self._later is not None:
            self._events.append(self._later())
            self._later = None

    def result(self) -> BatchResult:
        for event in self._events:
            event.wait()
        tokens, samples, runs = self._output.tokens.numpy(), self._batch.samples, None
        if self._output.verified is not None:
            columns = self._output.verified.numpy()
            tokens, runs = columns[:, 1], AcceptedRuns(columns[:, 2:], columns[:, 0])
        if np.count_nonzero(samples) != len(samples):
            tokens = np.where(samples | (tokens == NOT_FINITE), tokens, _NOT_SAMPLED)
        logprobs, prompt = _columns(self._output.logprobs), _columns(self._output.prompt)
        if runs is not None:
            logprobs = logprobs and _that_stand(logprobs, self._batch, runs)
        pooled = of_rows(self._output.pooled) if self._output.pooled else {}
        return BatchResult(tokens, logprobs, prompt, pooled, runs)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedGroup:
    """A launched group of layers after which no token is sampled.

    Attributes:
        num_rows: rows in the result. 0: the group does not end its forward.
    """

    batch: ScheduleBatch
    event: StreamEvent
    num_rows: int = 0

    def sample(self) -> None:
        pass

    def result(self) -> BatchResult:
        self.event.wait()
        return BatchResult(np.full(self.num_rows, NOT_SAMPLED, np.int32))


class ModelRunner:
    """Runs a model for the requests of a table. Engine thread only."""

    def __init__(self, builder: StepBuilder, forwards: Forwards | LeadingForwards) -> None:
        self.builder = builder
        self.forwards = forwards

    def with_host_pool(self, host_pool: HostPool, recorder: Recorder | None) -> "ModelRunner":
        return ModelRunner(self.builder, self.forwards.with_host_pool(host_pool, recorder))

    @property
    def graph_shapes(self) -> tuple[GraphShape, ...]:
        return self.forwards.graph_shapes

    def capture(self, shape: GraphShape) -> None:
        self.forwards.capture(shape)

    def rehearse(self, num_tokens: int) -> None:
        """Warm up: run the largest forward and all work that may follow a forward, over dummy
        tokens.

        Waits for the end. This compiles kernels and allocates the memory that they need.

        Args:
            num_tokens: tokens of the largest forward, at least one per slot.
        """
        for step, sampling in self.builder.rehearsals(num_tokens, self.forwards.spec):
            self.forwards.launch(step, sampling, StepOutput()).wait()

    def launch(self, batch: ScheduleBatch) -> LaunchedStep:
        """Copy the step's data from the table, and enqueue the step.

        If its sampling depends on the previous step, only the forward is enqueued now.
        """
        forwards, output = self.forwards, StepOutput()
        step, sampling = self.builder.build(batch, forwards.graph_of)
        if not sampling.late:
            return LaunchedStep(batch, output, forwards.launch(step, sampling, output))
        begun = forwards.launch_forward(step, sampling)

        def sample() -> StreamEvent:
            if begun.token_ids is not None:
                self.builder.note_drafts(batch, begun.token_ids().numpy())
            late = self.builder.build_late(batch, sampling)
            whole = replace(sampling, works=sampling.works + late.works)
            return begun.sample(whole, late.columns(), output)

        return LaunchedStep(batch, output, begun.event, sample)


class SplitRunner:
    """A runner that also launches groups of layers of prompts, see scheduler/split_prefill.py.
    Engine thread only.

    Args:
        begin: begins a forward of the model that is computed in groups of layers.
    """

    def __init__(self, runner: ModelRunner, forwards: Forwards, begin: BeginLayers) -> None:
        self._runner = runner
        self._forwards = forwards
        self._begin = begin
        self._unfinished: GroupedForward | None = None  # the forward between two of its groups

    def launch(self, batch: ScheduleBatch) -> LaunchedBatch:
        """Launch a step as ModelRunner does. At most one forward is between two of its groups."""
        group = batch.layers
        if group is None:
            return self._runner.launch(batch)
        if not group.first:
            self._unfinished = self._built(batch)
        forward = self._unfinished
        assert forward is not None
        if group.drops or group.is_last:
            self._unfinished = None
        copies, output = Step(swap_out=batch.swap_out, swap_in=batch.swap_in), StepOutput()
        if group.drops:
            event = self._forwards.launch(copies, NOTHING_ASKED, output)
            return LaunchedGroup(batch, event, num_rows=len(batch.slots))
        if group.is_last:
            event = self._forwards.launch_last_group(forward, group.past, copies, output)
            return LaunchedStep(batch, output, event)
        return LaunchedGroup(batch, self._forwards.launch_group(forward, group.past, copies))

    def _built(self, batch: ScheduleBatch) -> GroupedForward:
        step, sampling = self._runner.builder.build(batch)
        assert not sampling.late, "all tokens of prompts are known"
        return GroupedForward(step, sampling, self._begin)


def make_runner(
    model: Model,
    pool: KVPool,
    host_pool: HostPool,
    table: SlotTable,
    features: SamplingFeatures,
    adapters: AdapterManager,
    stream: DeviceStream,
    recorder: Recorder | None = None,
) -> ModelRunner:
    """Return a runner for the requests of a table. For the last arguments, see StepBuilder and
    Forwards."""
    builder = StepBuilder(table, features, adapters, axial_images=model.spec.axial_images)
    sizes = builder.sizes(model.spec)
    forwards = Forwards(model, pool, host_pool, adapters.bank, stream, sizes, recorder)
    return ModelRunner(builder, forwards)


def _rehearsal(
    rows: HostBatch, sampling: SamplingInputs, speculated: SpeculativeStep = NOTHING
) -> Step:
    if places := sampling.places:
        rows = rows.wanting(places)
    return Step(rows, speculated, heads=sampling.heads)


def _that_stand(
    logprobs: RowLogprobRequest, batch: ScheduleBatch, runs: AcceptedRuns
) -> RowLogprobRequest:
    """Return the logprobs of accepted tokens.

    Args:
        logprobs: logprobs of all samples, in order.
    """
    rows, places = standing(batch, runs)
    asked = np.isin(places, logprobs.rows)
    found = np.searchsorted(logprobs.rows, places[asked])
    return RowLogprobRequest(
        rows[asked].astype(np.int32),
        logprobs.chosen[found],
        logprobs.top_tokens[found],
        logprobs.top[found],
        None if logprobs.hidden is None else logprobs.hidden[found],
        None if logprobs.experts is None else logprobs.experts[found],
    )


def _columns(logprobs: Mapping[str, Tensor]) -> RowLogprobRequest | None:
    if not logprobs:
        return None
    columns = {name: tensor.numpy() for name, tensor in logprobs.items() if name != "hidden"}
    hidden = logprobs.get("hidden")  # numpy has no bfloat16
    return RowLogprobRequest(**columns, hidden=None if hidden is None else hidden.float().numpy())
