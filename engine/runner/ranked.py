"""Steps of a node with several ranks: rank 0 decides and samples, followers run the same steps.

Rank 0 sends each step before it runs it. All ranks therefore run the same collectives in the same
order: sums of layers, gathers of logits, and broadcasts of drafts and tokens. Followers apply the
head to the same inputs and have no other sampling work.
"""

import socket
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from common.errors import EngineFault
from common.requests.namespace import AdapterId
from engine.adapters.stored import LoraAdapter
from engine.batch.forward import HostBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.upload import HostColumn
from engine.kv_cache.kv import HostPool
from engine.models import ModelSpec
from engine.ranks import Group, Stage
from engine.ranks.messages import (
    MAX_PACKET_BYTES,
    CaptureGraph,
    EndRanks,
    Job,
    Ping,
    RankJob,
    ReplaceHostPages,
    SampleStep,
)
from engine.ranks.rank_groups import RankGroups
from engine.ranks.ring import BLOCKS, StepRing
from engine.runner.forwards import BegunStep, Draw, Forwards, TokenSampling
from engine.runner.launch_message import Launch, block_bytes, decode, encode
from engine.runner.staged import StagedForwards, launch_without_head
from engine.runner.step import Step, StepOutput
from engine.runner.stream import StreamEvent
from engine.sampling.choice_graphs import Recorder
from engine.sampling.composition import SampledTokens
from engine.sampling.heads import HiddenStates

_NO_TOKENS = torch.empty(0, dtype=torch.int32)
_TOKEN_BYTES = 64  # bytes per token of a step, without its locations: ids, positions, places, slots
_PAGE_BYTES = 16  # bytes per page of a step: its id in a table, or both ids of a copy

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Launch | SampleStep | CaptureGraph | EndRanks | Ping | RankJob
)


class _Leading:
    """The sampling of rank 0, which broadcasts all drawn tokens."""

    def __init__(self, sampling: TokenSampling, group: Group) -> None:
        self._sampling = sampling
        self._group = group

    def columns(self) -> Sequence[HostColumn]:
        return self._sampling.columns()

    def parameters(self) -> None:
        return None

    def draws(self, sent: Sequence[Tensor], early: Tensor | None) -> Draw:
        draw = self._sampling.draws(sent, early)
        return lambda logits, places: self._group.broadcast(draw(logits, places))

    def sample(self, states: HiddenStates, sent: Sequence[Tensor]) -> SampledTokens:
        sampled = self._sampling.sample(states, sent)
        if not states.inputs.chosen:
            return sampled
        return replace(sampled, tokens=self._group.broadcast(sampled.tokens))


class _Following:
    """The sampling of a follower with a part of the head. It receives all drawn tokens."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device

    def columns(self) -> Sequence[HostColumn]:
        return ()

    def parameters(self) -> None:
        return None

    def draws(self, sent: Sequence[Tensor], early: Tensor | None) -> Draw:
        return lambda logits, places: self._received(len(logits))

    def sample(self, states: HiddenStates, sent: Sequence[Tensor]) -> SampledTokens:
        for _ in states.logits():
            pass  # each result is a part of the logits, which rank 0 gathers
        if not states.inputs.chosen:
            return SampledTokens(_NO_TOKENS)
        return SampledTokens(self._received(states.num_samples))

    def _received(self, count: int) -> Tensor:
        received = torch.zeros(count, dtype=torch.int32, device=self._device)
        return self._group.broadcast(received)


class StepSender(Protocol):
    """The connection from rank 0 to the followers, as steps need it.

    Attributes:
        steps_sent: number of steps that rank 0 has begun.
        steps_done: number of steps that rank 0 has finished.
    """

    steps_sent: int
    steps_done: int

    def send(self, header: bytes) -> None:
        """Send the header of a step or a CaptureGraph to all followers, without waiting."""
        ...


class LeadingForwards:
    """The forwards of rank 0, with the interface of Forwards. Engine thread only."""

    def __init__(
        self,
        forwards: Forwards | StagedForwards,
        followers: StepSender,
        ranks: RankGroups,
        ring: StepRing,
    ) -> None:
        self._forwards = forwards
        self._followers = followers
        self._ranks = ranks
        self._ring = ring
        self._events: list[StreamEvent | None] = [None] * BLOCKS  # events of the newest steps
        self._number = 0

    @property
    def spec(self) -> ModelSpec:
        return self._forwards.spec

    def with_host_pool(self, host_pool: HostPool, recorder: Recorder | None) -> "LeadingForwards":
        """See Forwards. Followers replace their host pages by ReplaceHostPages."""
        changed = copy(self)  # keeps the step number
        changed._forwards = self._forwards.with_host_pool(host_pool, recorder)
        return changed

    @property
    def graph_shapes(self) -> tuple[GraphShape, ...]:
        return self._forwards.graph_shapes

    def graph_of(self, rows: HostBatch, *, late: bool, adapted: bool) -> GraphShape | None:
        return self._forwards.graph_of(rows, late=late, adapted=adapted)

    def capture(self, shape: GraphShape) -> None:
        """Capture a graph on all ranks, see Forwards.capture. If a rank cannot, the node ends."""
        self._followers.send(_encoder.encode(CaptureGraph(shape)))
        self._forwards.capture(shape, choice=False)

    def launch(self, step: Step, sampling: TokenSampling, output: StepOutput) -> StreamEvent:
        """Send and enqueue a step, see Forwards.launch."""
        self._send(step)
        event = self._forwards.launch(step, _Leading(sampling, self._ranks.own), output)
        return self._noted(_ended(step, event, self._forwards, self._ranks))

    def launch_forward(self, step: Step, sampling: TokenSampling) -> BegunStep:
        """Send a step and enqueue its forward, see Forwards.launch_forward."""
        self._send(step)
        group = self._ranks.own
        begun = self._forwards.launch_forward(step, _Leading(sampling, group))
        forward = self._noted(begun.event)

        def launch_sampling(
            whole: TokenSampling, added: Sequence[HostColumn], output: StepOutput
        ) -> StreamEvent:
            sampled = begun.sample(_Leading(whole, group), added, output)
            self._events[(forward.number - 1) % BLOCKS] = sampled
            return _CountedEvent(sampled, forward.number, self._followers)

        return replace(begun, event=forward, sample=launch_sampling)

    def _send(self, step: Step) -> None:
        """Send a step, in the shared-memory block of the step BLOCKS steps ago."""
        num_bytes, ring = block_bytes(step), self._ring
        if num_bytes > ring.block_bytes:
            raise EngineFault(f"a step of {num_bytes} bytes, {ring.block_bytes} fit into a block")
        # Wait until every rank has read that block. Once rank 0 has finished the step after it,
        # they all have: that step has collectives, which a rank begins only when it has finished
        # everything before.
        later = self._events[(self._number + 1) % BLOCKS]
        if later is not None:
            later.wait()
        header = _encoder.encode(encode(step, ring.block(self._number)))
        if len(header) > MAX_PACKET_BYTES:
            raise EngineFault(f"the header of a step takes {len(header)} bytes")
        self._followers.send(header)

    def _noted(self, event: StreamEvent) -> "_CountedEvent":
        self._events[self._number % BLOCKS] = event
        self._number += 1
        self._followers.steps_sent = self._number
        return _CountedEvent(event, self._number, self._followers)


@dataclass(frozen=True, slots=True, eq=False)
class _CountedEvent:
    """The event of a step. It counts the steps that rank 0 has finished."""

    event: StreamEvent
    number: int  # steps up to this one
    followers: StepSender

    @property
    def is_done(self) -> bool:
        return self.event.is_done

    def wait(self) -> None:
        self.event.wait()
        self.followers.steps_done = max(self.followers.steps_done, self.number)


class SentSteps:
    """The newest steps of a follower."""

    def __init__(self) -> None:
        self._number = 0
        self._events: deque[StreamEvent] = deque(maxlen=BLOCKS)

    @property
    def number(self) -> int:
        return self._number

    @property
    def num_done(self) -> int:
        """Return the number of finished steps. At most BLOCKS steps are unfinished."""
        return self._number - sum(not event.is_done for event in self._events)

    @property
    def newest(self) -> StreamEvent | None:
        return self._events[-1] if self._events else None

    def add(self, event: StreamEvent) -> None:
        self._number += 1
        self._events.append(event)

    def after(self, number: int) -> StreamEvent | None:
        """Return an event after which `number` steps are finished. None: they are already."""
        newer = self._number - number
        return self._events[-1 - newer] if 0 <= newer < len(self._events) else None


class Jobs(Protocol):
    """Work of a follower other than steps."""

    def report(self, steps: "SentSteps") -> None:
        """Reply to a Ping."""
        ...

    def take(self, number: int, job: Job, steps: "SentSteps") -> None:
        """Begin a job, without waiting."""
        ...

    def adapter(self, identity: AdapterId) -> LoraAdapter:
        """Return this rank's part of an adapter."""
        ...

    def with_host_pages(self, number: int, num_pages: int, forwards: Forwards) -> Forwards:
        """Return the forwards over other host pages. Called between steps, for a job."""
        ...


class _StepFollower(Protocol):
    """Runs steps on a follower."""

    def run(self, step: Step) -> StreamEvent:
        """Enqueue a step. Return an event after which its pages are written."""
        ...

    def sample_now(self) -> None: ...


class _OnlyStage:
    def __init__(self, forwards: Forwards, ranks: RankGroups) -> None:
        self._forwards = forwards
        self._sampling = _Following(ranks.own, forwards.device)

    def run(self, step: Step) -> StreamEvent:
        return self._forwards.launch(step, self._sampling, StepOutput())

    def sample_now(self) -> None:
        pass


class _FirstStage:
    def __init__(self, forwards: Forwards, ranks: RankGroups, stage: Stage) -> None:
        self._forwards = StagedForwards(forwards, stage)
        self._sampling = _Following(ranks.own, forwards.device)

    def run(self, step: Step) -> StreamEvent:
        if step.rows is None:
            return self._forwards.launch(step, self._sampling, StepOutput())
        begun = self._forwards.launch_forward(step, self._sampling)
        begun.sample(self._sampling, (), StepOutput())
        return begun.event

    def sample_now(self) -> None:
        self._forwards.sample_now()


class _LastStage:
    def __init__(self, forwards: Forwards) -> None:
        self._forwards = forwards

    def run(self, step: Step) -> StreamEvent:
        return launch_without_head(self._forwards, step)

    def sample_now(self) -> None:
        pass


def _step_follower(forwards: Forwards, ranks: RankGroups) -> _StepFollower:
    stage = ranks.share.stage
    if stage is None:
        return _OnlyStage(forwards, ranks)
    return _FirstStage(forwards, ranks, stage) if stage.is_first else _LastStage(forwards)


def follow(
    steps: socket.socket, ring: StepRing, forwards: Forwards, ranks: RankGroups, jobs: Jobs
) -> None:
    """Run the steps and jobs of rank 0 until it ends.

    Never waits for a step, because rank 0 is at most a few steps ahead. Waits for the capture of a
    graph.

    Args:
        forwards: forwards over a stream that ends the process if a step fails.
    """
    sent, follower = SentSteps(), _step_follower(forwards, ranks)
    while packet := steps.recv(MAX_PACKET_BYTES):
        match _decoder.decode(packet):
            case Launch() as launch:
                step = decode(launch, ring.block(sent.number), jobs.adapter)
                sent.add(_ended(step, follower.run(step), forwards, ranks))
            case SampleStep():
                follower.sample_now()
            case CaptureGraph(shape=shape):
                forwards.capture(GraphShape(*shape), choice=False)
            case Ping():
                jobs.report(sent)
            case RankJob(number=number, job=ReplaceHostPages(num_pages=num_pages)):
                forwards = jobs.with_host_pages(number, num_pages, forwards)
                follower = _step_follower(forwards, ranks)
            case EndRanks():
                return
            case RankJob(number=number, job=job):
                jobs.take(number, job, sent)


def largest_step(
    num_tokens: int,
    num_tables: int,
    num_slots: int,
    max_pages: int,
    num_copies: int,
    embedding_size: int = 0,
) -> int:
    """Return an upper bound of the size of a step in bytes.

    Args:
        num_tokens: tokens of the largest forward.
        max_pages: pages of one row, in all page tables together.
        num_copies: pages that are swapped.
        embedding_size: numbers per input embedding. 0: none are accepted.
    """
    tokens = num_tokens * (_TOKEN_BYTES + 16 * num_tables + 4 * embedding_size)
    pages = num_slots * max_pages + 2 * num_copies
    return (1 << 20) + 2 * tokens + _PAGE_BYTES * pages


def _ended(
    step: Step, event: StreamEvent, forwards: Forwards | StagedForwards, ranks: RankGroups
) -> StreamEvent:
    """Return an event of a step after which each rank has begun the step's end. A step without rows
    needs a collective for this."""
    if step.rows is not None:
        return event
    return forwards.enqueue(lambda: ranks.meet(forwards.device))
