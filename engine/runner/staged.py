"""Steps of a node with two pipeline stages, on a rank of the first stage.

    this stage:  layers 1, send 1, layers 2, sample 1, send 2, layers 3, sample 2, send 3, ...
    last stage:                    layers 1, back 1,   layers 2,         back 2, ...

While the last stage computes a step, the first stage begins the next one. The hidden states of a
step come back after the first stage's layers of the next step. The first stage samples them before
it sends the next step, because the last stage receives nothing else in between. It samples at once
if the next step needs the tokens as input, or if they are needed before there is a next step.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from common.errors import EngineFault
from engine.batch.forward import HostBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.upload import HostColumn
from engine.kv_cache.kv import HostPool
from engine.models import ModelSpec
from engine.ranks import Stage
from engine.runner.forwards import BegunStep, Draw, Forwards, SharedSampling, TokenSampling
from engine.runner.step import Step, StepOutput
from engine.runner.stream import StreamEvent
from engine.sampling.choice_graphs import Recorder
from engine.sampling.composition import SampledTokens, SamplingInputs
from engine.sampling.heads import HeadInputs, HiddenStates

_NO_TOKENS = torch.empty(0, dtype=torch.int32)


@dataclass(slots=True, eq=False)
class _Sampling:
    """The sampling of a step. It may be enqueued later. A caller that waits for it enqueues it."""

    work: Callable[[], None]
    wanted: "Callable[[_Sampling], None]"
    event: StreamEvent | None = None  # None: not enqueued yet

    @property
    def is_done(self) -> bool:
        return self.event is not None and self.event.is_done

    def wait(self) -> None:
        if self.event is None:
            self.wanted(self)
        assert self.event is not None
        self.event.wait()


class _Received(SharedSampling):
    """A sampling of hidden states that come back from the last stage."""

    def __init__(self, sampling: TokenSampling, stage: Stage) -> None:
        self._sampling = sampling
        self._stage = stage

    def columns(self) -> Sequence[HostColumn]:
        return self._sampling.columns()

    def draws(self, sent: Sequence[Tensor], early: Tensor | None) -> Draw:
        return self._sampling.draws(sent, early)

    def sample(self, states: HiddenStates, sent: Sequence[Tensor]) -> SampledTokens:
        experts = self._stage.receive_back(states.hidden)
        if experts is not None:  # the model already has the experts of the next step
            states = replace(states, routed=experts.to(torch.int16))
        return self._sampling.sample(states, sent)


class StagedForwards:
    """The forwards of a rank of the first stage, with the interface of Forwards. Engine thread
    only.

    Attributes:
        graph_shapes: empty, because a step has parts before and after the exchange of tensors.

    Args:
        on_early: called before tokens are sampled although no step follows. All ranks of the stage
            must do so between the same steps, see `sample_now`.
    """

    graph_shapes: tuple[GraphShape, ...] = ()

    def __init__(
        self, forwards: Forwards, stage: Stage, on_early: Callable[[], None] = lambda: None
    ) -> None:
        self._forwards = forwards
        self._stage = stage
        self._on_early = on_early
        self._waiting: _Sampling | None = None

    @property
    def spec(self) -> ModelSpec:
        """Return the model's spec without a drafter, because its tokens need all layers."""
        return _without_drafter(self._forwards.spec)

    @property
    def device(self) -> torch.device:
        return self._forwards.device

    def graph_of(self, rows: HostBatch, *, late: bool, adapted: bool) -> None:
        return None

    def capture(self, shape: GraphShape, *, choice: bool = True) -> None:
        raise EngineFault("no graph is captured with stages")

    def with_host_pool(self, host_pool: HostPool, recorder: Recorder | None) -> "StagedForwards":
        self.sample_now()
        changed = copy(self)
        changed._forwards = self._forwards.with_host_pool(host_pool, recorder)
        return changed

    def launch(self, step: Step, sampling: TokenSampling, output: StepOutput) -> StreamEvent:
        """Enqueue a step, see Forwards.launch. Its sampling is enqueued later."""
        if step.rows is None:
            self.sample_now()
            return self._forwards.launch(step, sampling, output)
        return self.launch_forward(step, sampling).sample(sampling, (), output)

    def launch_forward(self, step: Step, sampling: TokenSampling) -> BegunStep:
        """Enqueue a step's forward, see Forwards.launch_forward."""
        rows = step.rows
        assert rows is not None
        if _has_newest_tokens(rows):
            self.sample_now()
        _, sampling_work = self._forwards.begin(step, sampling)
        self.sample_now()
        sent = self._forwards.enqueue(self._stage.send_held)

        def launch_sampling(
            whole: TokenSampling, added: Sequence[HostColumn], output: StepOutput
        ) -> StreamEvent:
            received = _Received(whole, self._stage)
            self._waiting = _Sampling(sampling_work(received, added, output), self._wanted)
            return self._waiting

        return BegunStep(sent, launch_sampling)

    def enqueue(self, work: Callable[[], None]) -> StreamEvent:
        return self._forwards.enqueue(work)

    def sample_now(self) -> None:
        """Enqueue the pending sampling, if there is one."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.event = self._forwards.enqueue(waiting.work)

    def _wanted(self, sampling: _Sampling) -> None:
        assert sampling is self._waiting
        self._on_early()
        self.sample_now()


class _NotSampling(SharedSampling):
    """The sampling of a rank without a head, which has no drafts either."""

    def draws(self, sent: Sequence[Tensor], early: Tensor | None) -> Draw:
        raise EngineFault("drafts need all layers in one stage")

    def sample(self, states: HiddenStates, sent: Sequence[Tensor]) -> SampledTokens:
        return SampledTokens(_NO_TOKENS)


def launch_without_head(forwards: Forwards, step: Step) -> StreamEvent:
    """Enqueue a step of the last stage."""
    headless = msgspec.structs.replace(step, heads=HeadInputs(chosen=False))
    return forwards.launch(headless, _NotSampling(), StepOutput())


def rehearse_stage(
    rehearsals: Callable[[int, ModelSpec], Iterator[tuple[Step, SamplingInputs]]],
    num_tokens: int,
    forwards: Forwards,
    stage: Stage,
) -> None:
    """Run the largest steps of a rank of a stage, see ModelRunner.rehearse. Each rank samples for
    itself. The ranks of the other stage do the same at the same time.

    Args:
        rehearsals: StepBuilder.rehearsals of the engine.
    """
    for step, sampling in rehearsals(num_tokens, _without_drafter(forwards.spec)):
        if stage.is_first:
            StagedForwards(forwards, stage).launch(step, sampling, StepOutput()).wait()
        else:
            launch_without_head(forwards, step).wait()


def _without_drafter(spec: ModelSpec) -> ModelSpec:
    return replace(spec, draft=None)


def _has_newest_tokens(rows: HostBatch) -> bool:
    """Return whether input tokens may still have to be sampled."""
    return bool((rows.token_ids < 0).any())
