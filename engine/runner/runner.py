"""The runner launches the scheduler's decisions: it builds a step, and enqueues it with its
sampling."""

from dataclasses import replace

from engine.adapters.adapters import AdapterManager
from engine.batch.batch import LaunchedBatch, ScheduleBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.table import SlotTable
from engine.kv_cache.kv import HostPool, KVPool
from engine.models import Model
from engine.runner.forwards import BeginLayers, Forwards, HeldForward
from engine.runner.graphs import Recorder
from engine.runner.launched import LaunchedGroup, LaunchedStep, StepOutput
from engine.runner.ranked import LeadingForwards
from engine.runner.step import Step
from engine.runner.step_builder import StepBuilder
from engine.runner.stream import DeviceStream, StreamEvent
from engine.sampling.composition import NOTHING_ASKED, SamplingFeatures


class ModelRunner:
    """Runs a model for the requests of a table. Engine thread only."""

    def __init__(self, builder: StepBuilder, forwards: Forwards | LeadingForwards) -> None:
        self.builder = builder
        self.forwards = forwards

    def with_host_pool(self, host_pool: HostPool, recorder: Recorder | None) -> "ModelRunner":
        """See Forwards."""
        return ModelRunner(self.builder, self.forwards.with_host_pool(host_pool, recorder))

    @property
    def graph_shapes(self) -> tuple[GraphShape, ...]:
        """See Forwards."""
        return self.forwards.graph_shapes

    def capture(self, shape: GraphShape) -> None:
        """See Forwards."""
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
        self._held: HeldForward | None = None  # the forward between two of its groups

    def launch(self, batch: ScheduleBatch) -> LaunchedBatch:
        """Launch a step as ModelRunner does. At most one forward is between two of its groups."""
        group = batch.layers
        if group is None:
            return self._runner.launch(batch)
        if not group.first:
            self._held = self._built(batch)
        forward = self._held
        assert forward is not None
        if group.drops or group.is_last:
            self._held = None
        copies, output = Step(swap_out=batch.swap_out, swap_in=batch.swap_in), StepOutput()
        if group.drops:
            event = self._forwards.launch(copies, NOTHING_ASKED, output)
            return LaunchedGroup(batch, event, num_rows=len(batch.slots))
        if group.is_last:
            event = self._forwards.launch_last_group(forward, group.past, copies, output)
            return LaunchedStep(batch, output, event)
        return LaunchedGroup(batch, self._forwards.launch_group(forward, group.past, copies))

    def _built(self, batch: ScheduleBatch) -> HeldForward:
        step, sampling = self._runner.builder.build(batch)
        assert not sampling.late, "all tokens of prompts are known"
        return HeldForward(step, sampling, self._begin)


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
