"""Steps of a node with several ranks: rank 0 decides and samples, followers run the same steps.

Rank 0 sends each step before it runs it. All ranks therefore run the same collectives in the same
order: sums of layers, gathers of logits, and broadcasts of drafts and tokens. Followers apply the
head to the same inputs and have no other sampling work.
"""

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

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
from engine.ranks import Group
from engine.ranks.messages import MAX_PACKET_BYTES, CaptureGraph
from engine.ranks.processes import Followers
from engine.ranks.rank_groups import RankGroups
from engine.ranks.ring import BLOCKS, StepRing
from engine.runner.forwards import BegunStep, Draw, Forwards, SharedSampling, TokenSampling
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


class _Leading(SharedSampling):
    """The sampling of rank 0, which broadcasts all drawn tokens."""

    def __init__(self, sampling: TokenSampling, group: Group) -> None:
        self._sampling = sampling
        self._group = group

    def columns(self) -> Sequence[HostColumn]:
        return self._sampling.columns()

    def draws(self, sent: Sequence[Tensor], early: Tensor | None) -> Draw:
        draw = self._sampling.draws(sent, early)
        return lambda logits, places: self._group.broadcast(draw(logits, places))

    def sample(self, states: HiddenStates, sent: Sequence[Tensor]) -> SampledTokens:
        sampled = self._sampling.sample(states, sent)
        if not states.inputs.chosen:
            return sampled
        return replace(sampled, tokens=self._group.broadcast(sampled.tokens))


class _Following(SharedSampling):
    """The sampling of a follower with a part of the head. It receives all drawn tokens."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device

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


class LeadingForwards:
    """The forwards of rank 0, with the interface of Forwards. Engine thread only."""

    def __init__(
        self,
        forwards: Forwards | StagedForwards,
        followers: Followers,
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
    followers: Followers

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


class FollowedSteps:
    """The steps of rank 0 on a follower.

    Args:
        forwards: forwards over a stream that ends the process if a step fails.
        ring: has the blocks of the steps.
    """

    def __init__(self, forwards: Forwards, ranks: RankGroups, ring: StepRing) -> None:
        self.sent = SentSteps()
        self._ranks = ranks
        self._ring = ring
        self._stage = ranks.share.stage
        self._sampling = _Following(ranks.own, forwards.device)
        self.use(forwards)

    def use(self, forwards: Forwards) -> None:
        """Run later steps by other forwards."""
        self.forwards = forwards
        stage = self._stage
        self._first = StagedForwards(forwards, stage) if stage and stage.is_first else None

    def run(self, launch: Launch, adapter: Callable[[AdapterId], LoraAdapter]) -> None:
        """Enqueue a step. `adapter`: see `decode`."""
        step = decode(launch, self._ring.block(self.sent.number), adapter)
        self.sent.add(_ended(step, self._launch(step), self.forwards, self._ranks))

    def sample_now(self) -> None:
        if self._first is not None:
            self._first.sample_now()

    def _launch(self, step: Step) -> StreamEvent:
        """Return an event after which the pages of a step are written."""
        sampling, first = self._sampling, self._first
        if self._stage is None:
            return self.forwards.launch(step, sampling, StepOutput())
        if first is None:
            return launch_without_head(self.forwards, step)
        if step.rows is None:
            return first.launch(step, sampling, StepOutput())
        begun = first.launch_forward(step, sampling)
        begun.sample(sampling, (), StepOutput())
        return begun.event


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
