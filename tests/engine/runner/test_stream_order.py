"""On a GPU: accesses to the same memory are ordered, and the launches of a forward depend only
on shapes."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.requests.sampling import SamplingParams
from engine.batch.forward import ForwardBatch
from engine.build import prepare
from engine.kv_cache.kv import KVPool
from engine.models import Model, load
from engine.models.blocks.layer import LateStates
from engine.runner import forwards as forwards_module
from kernels import device
from tests.engine.runner.stream_order import GPU, Operation, StreamOrder, followed
from tests.engine.runner.traffic import Traffic
from tests.support.engine.steps import GREEDY, Steps
from tests.support.models.checkpoints import VOCABULARY_SIZE, make_checkpoint

pytestmark = pytest.mark.skipif(
    not device.INTERPRETED, reason="kernels that Triton compiles cannot be followed"
)
NUM_SLOTS = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def serve(steps: Steps, num_steps: int) -> None:
    """Start an engine, as `build` does, and serve traffic."""
    prepare(steps.runner, 64 + NUM_SLOTS)
    traffic = Traffic(steps, 1, vocabulary_size=VOCABULARY_SIZE, drafts=True)
    for _ in range(num_steps):
        traffic.step()
    steps.settle()
    steps.close()


# Seen failing without the wait of a CudaStream for its maker's stream (weights), without the one of
# a CudaEvent (tokens), and with a swap on the stream of the caller.
def test_all_work_on_the_same_memory_is_ordered(checkpoint: Path) -> None:
    with followed() as order:
        model = load(checkpoint, GPU, torch.bfloat16)
        serve(Steps(model, num_slots=NUM_SLOTS, recorder=order.record), 150)
    assert order.problems == []
    assert len(order.operations) > 1000


def test_a_zero_fill_on_another_stream_is_found(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A former bug: a runner's buffers were zeroed on the stream of their creator."""
    monkeypatch.setattr(forwards_module, "made_on", lambda stream, make: make())
    with followed() as order:
        model = load(checkpoint, GPU, torch.bfloat16)
        serve(Steps(model, num_slots=NUM_SLOTS, recorder=order.record), 3)
    assert any("written by zeros on the default stream" in problem for problem in order.problems)


class Watched:
    """A model, and the hazards of its own work."""

    def __init__(self, model: Model, order: StreamOrder) -> None:
        self.spec, self.device, self.dtype = model.spec, model.device, model.dtype
        self.drafter = model.drafter
        self.hazards: list[str] = []
        self._model = model
        self._order = order

    def forward(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        future_tokens: Tensor,
        adapted: None = None,
        late: LateStates | None = None,
    ) -> Tensor:
        self._order.hazards.clear()
        hidden = self._model.forward(batch, pool, future_tokens, adapted, late)
        self.hazards += self._order.hazards
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self._order.hazards.clear()
        logits = self._model.logits(hidden)
        self.hazards += self._order.hazards
        return logits


# Seen failing with a tensor made of a number in the forward, and with one of pinned memory.
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_a_forward_neither_waits_nor_uploads_nor_pins(tmp_path: Path, architecture: str) -> None:
    directory = make_checkpoint(tmp_path, architecture)
    with followed() as order:
        model = Watched(load(directory, GPU, torch.bfloat16), order)
        serve(Steps(model, num_slots=NUM_SLOTS), 25)
    assert model.hazards == []
    assert any(operation.name == "_split_kernel" for operation in order.operations)


def launched(order: StreamOrder, model: Model, seed: int) -> list[Operation]:
    """Return the operations that steps of the same shapes enqueue."""
    rng = random.Random(seed)
    steps = Steps(model, num_slots=NUM_SLOTS)
    kinds = (
        {"temperature": rng.uniform(0.5, 1.5), "top_k": rng.randrange(1, 99)},
        {"temperature": rng.uniform(0.5, 1.5), "top_p": rng.uniform(0.1, 0.9)},
        {"temperature": 0.0, "repetition_penalty": rng.uniform(1.1, 2.0)},
    )
    params = [GREEDY, *(SamplingParams(max_tokens=99, seed=seed, **kind) for kind in kinds)]
    order.operations.clear()
    slots = [steps.add([rng.randrange(VOCABULARY_SIZE) for _ in range(40)], own) for own in params]
    steps.launch([(slot, 0, 32) for slot in slots], samples=[False] * len(slots))
    steps.launch([(slot, 32, 40) for slot in slots])
    for _ in range(3):
        steps.decode(*slots)
    steps.settle()
    steps.close()
    return list(order.operations)


# Seen failing with page ids cut after the largest one.
def test_steps_of_equal_shapes_launch_the_same_operations(checkpoint: Path) -> None:
    with followed() as order:
        model = load(checkpoint, GPU, torch.bfloat16)
        first, *others = (launched(order, model, seed) for seed in range(4))
    assert len(first) > 100
    assert all(other == first for other in others)


# Tests of the checker itself. Each case was seen failing without the line that it is about.


class Two:
    """Two streams, and memory that both use."""

    def __init__(self) -> None:
        self.a, self.b = torch.cuda.Stream(), torch.cuda.Stream()
        self.room = torch.empty(8, device=GPU)
        self.host = torch.empty(8)
        for stream in (self.a, self.b):
            stream.wait_stream(torch.cuda.current_stream())

    def on(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> torch.cuda.Event:
        """Enqueue it, followed by the event."""
        with torch.cuda.stream(stream):
            work()
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def writes_on_both(self) -> None:
        self.on(self.a, self.room.zero_)
        self.on(self.b, self.room.zero_)

    def reads_what_is_being_written(self) -> None:
        self.on(self.a, self.room.zero_)
        self.on(self.b, self.room.sum)

    def writes_what_is_being_read(self) -> None:
        self.on(self.a, self.room.sum)
        self.on(self.b, self.room.zero_)

    def writes_where_two_read_and_waits_for_one(self) -> None:
        self.on(self.a, self.room.sum)
        self.on(self.b, self.room.sum)
        third = torch.cuda.Stream()
        third.wait_stream(self.b)
        self.on(third, self.room.zero_)

    def writes_parts_that_overlap(self) -> None:
        self.on(self.a, self.room[:5].zero_)
        self.on(self.b, self.room[4:].zero_)

    def hands_numbers_out_too_early(self) -> None:
        self.on(self.a, lambda: self.host.copy_(self.room, non_blocking=True))
        self.host.numpy()

    def computes_with_numbers_too_early(self) -> None:
        self.on(self.a, lambda: self.host.copy_(self.room, non_blocking=True))
        self.host.sum()

    def reads_on_both(self) -> None:
        self.on(self.a, self.room.sum)
        self.on(self.b, self.room.sum)

    def writes_parts_that_lie_side_by_side(self) -> None:
        self.on(self.a, self.room[:4].zero_)
        self.on(self.b, self.room[4:].zero_)

    def waits_for_an_event(self) -> None:
        self.b.wait_event(self.on(self.a, self.room.zero_))
        self.on(self.b, self.room.zero_)

    def waits_for_a_stream(self) -> None:
        self.on(self.a, self.room.zero_)
        self.b.wait_stream(self.a)
        self.on(self.b, self.room.zero_)

    def hands_numbers_out_when_they_are_there(self) -> None:
        self.on(self.a, lambda: self.host.copy_(self.room, non_blocking=True)).synchronize()
        self.host.numpy()

    def waits_in_a_copy(self) -> None:
        self.on(self.a, lambda: self.host.copy_(self.room))
        self.host.numpy()


@pytest.mark.parametrize(
    "work",
    [
        Two.writes_on_both,
        Two.reads_what_is_being_written,
        Two.writes_what_is_being_read,
        Two.writes_where_two_read_and_waits_for_one,
        Two.writes_parts_that_overlap,
        Two.hands_numbers_out_too_early,
        Two.computes_with_numbers_too_early,
    ],
)
def test_the_checker_finds_unordered_accesses(work: Callable[[Two], None]) -> None:
    with followed() as order:
        work(Two())
    assert len(order.problems) == 1


@pytest.mark.parametrize(
    "work",
    [
        Two.reads_on_both,
        Two.writes_parts_that_lie_side_by_side,
        Two.waits_for_an_event,
        Two.waits_for_a_stream,
        Two.hands_numbers_out_when_they_are_there,
        Two.waits_in_a_copy,
    ],
)
def test_the_checker_reports_no_ordered_accesses(work: Callable[[Two], None]) -> None:
    with followed() as order:
        work(Two())
    assert order.problems == []


@pytest.mark.parametrize(
    "work, hazard",
    [
        (lambda: torch.empty(2, pin_memory=True), "empty of pinned memory"),
        (lambda: torch.tensor([1, 2], device=GPU), "a tensor on the device made of numbers"),
        (lambda: torch.ones(2).to(GPU), "a copy between host and device"),
        (lambda: torch.cuda.current_stream().synchronize(), "the host waits"),
    ],
)
def test_the_checker_detects_forbidden_operations_of_a_forward(
    work: Callable[[], object], hazard: str
) -> None:
    with followed() as order:
        work()
    assert hazard in order.hazards
