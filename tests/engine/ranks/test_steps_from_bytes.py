"""A second rank runs every step of the first one from bytes, and has the same logits and pages."""

import contextlib
import copy
import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from common.config import EngineConfig, SpeculativeConfig
from common.requests.images import Image
from common.requests.pooling import PoolingMode, PoolingParams
from engine.adapters.adapters import bank_of
from engine.batch.graph_shapes import GraphShape
from engine.batch.images import VisibleImage
from engine.batch.upload import HostColumn
from engine.build import Engine, build
from engine.kv_cache.kv import HostPool, KVPool
from engine.loop.loop import EventLoop
from engine.models import Model
from engine.runner.forwards import Forwards
from engine.runner.launch_message import Launch, block_bytes, decode, encode
from engine.runner.runner import ModelRunner
from engine.runner.step import Step, StepOutput
from engine.runner.stream import StreamEvent, WorkerStream
from engine.sampling.composition import SampledTokens
from engine.sampling.heads import HiddenStates
from tests.engine.ranks.scheduler_role import (
    EVERY_POOLING,
    EVERY_SAMPLING,
    NUM_PAGES,
    Make,
    SchedulerRole,
    adapted,
    config_of,
    drafted,
    plain,
    prompt,
    sampled,
    serve_adapters,
    serve_every_sampling,
    serve_text,
)
from tests.support.hardware.tapes import RepeatRecorder
from tests.support.models.drafters import make_draft, make_hybrid_mtp, make_mtp
from tests.support.models.vision import make_vision_checkpoint, picture, with_images

PATIENCE_S = 120.0
HEADER_BYTES = 1000


class Wire:
    """The tensors that the first rank's forward stream sends to the second one's, in order."""

    def __init__(self) -> None:
        self._sent: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def send(self, tensor: Tensor) -> Tensor:
        self._sent.put(tensor.clone())
        return tensor

    def receive(self) -> Tensor:
        return self._sent.get(timeout=PATIENCE_S)

    def receive_same(self, tensor: Tensor) -> None:
        sent = self.receive()
        assert sent.dtype == tensor.dtype and torch.equal(sent, tensor)


class Sending:
    """The heads of the first rank's model."""

    def __init__(self, heads: Any, wire: Wire) -> None:
        self.labels = heads.labels
        self._heads, self._wire = heads, wire

    def logits(self, hidden: Tensor) -> Tensor:
        return self._wire.send(self._heads.logits(hidden))


class FirstSampling:
    """The sampling of the first rank, which sends logits and tokens."""

    def __init__(self, sampling: Any, wire: Wire) -> None:
        self._sampling, self._wire = sampling, wire

    def columns(self) -> Sequence[HostColumn]:
        return self._sampling.columns()

    def parameters(self) -> None:
        return None  # both ranks take part in the choice

    def draws(self, sent: Sequence[Tensor], early: Tensor | None) -> Any:
        draw, wire = self._sampling.draws(sent, early), self._wire
        return lambda logits, places: wire.send(draw(wire.send(logits), places))

    def sample(self, states: HiddenStates, sent: Sequence[Tensor]) -> SampledTokens:
        states = replace(states, model=Sending(states.model, self._wire))
        sampled = self._sampling.sample(states, sent)
        self._wire.send(sampled.tokens)
        return sampled


class SecondSampling:
    """The second rank does no sampling: it applies the head and receives the tokens."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def columns(self) -> Sequence[HostColumn]:
        return ()

    def parameters(self) -> None:
        return None  # both ranks take part in the choice

    def draws(self, sent: Sequence[Tensor], early: Tensor | None) -> Any:
        def draw(logits: Tensor, places: Tensor) -> Tensor:
            self._wire.receive_same(logits)
            return self._wire.receive()

        return draw

    def sample(self, states: HiddenStates, sent: Sequence[Tensor]) -> SampledTokens:
        for logits in states.logits():
            self._wire.receive_same(logits)
        return SampledTokens(self._wire.receive())


class SendingTower:
    """The image encoder of the first rank."""

    def __init__(self, tower: Any, wire: Wire) -> None:
        self._tower, self._wire = tower, wire

    def embed(self, seen: Sequence[VisibleImage], x: Tensor) -> Any:
        features = self._tower.embed(seen, x)
        for part in seen:
            self._wire.send(x[part.place : part.place + part.last - part.first])
        return features


class ReceivingTower:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def embed(self, seen: Sequence[VisibleImage], x: Tensor) -> Any:
        for part in seen:
            x[part.place : part.place + part.last - part.first] = self._wire.receive()
        return ()


@dataclass(eq=False)
class Following:
    """A step that the second rank runs, and the first rank's result."""

    event: StreamEvent
    output: StepOutput
    expected: StepOutput = field(default_factory=StepOutput)


class TwoRanks:
    """The forwards of two ranks instead of one. Every step is sent to the second one as bytes."""

    def __init__(self, first: Forwards, second: Forwards, wire: Wire, engine: Engine) -> None:
        self.spec, self.graph_of = first.spec, first.graph_of
        self.graph_shapes = first.graph_shapes
        self.seen: set[str] = set()
        self._first, self._second, self._wire = first, second, wire
        self._adapters = engine.adapters.library
        self._running: list[Following] = []

    def capture(self, shape: GraphShape) -> None:
        self._first.capture(shape, choice=False)
        self._second.capture(shape, choice=False)

    def launch(self, step: Step, sampling: Any, output: StepOutput) -> Any:
        self._follow(step).expected = output
        return self._first.launch(step, FirstSampling(sampling, self._wire), output)

    def launch_forward(self, step: Step, sampling: Any) -> Any:
        self.seen.add("late sampling")
        following, wire = self._follow(step), self._wire
        begun = self._first.launch_forward(step, FirstSampling(sampling, wire))

        def launch_sampling(whole: Any, added: Sequence[Tensor], output: StepOutput) -> Any:
            following.expected = output
            return begun.sample(FirstSampling(whole, wire), added, output)

        return replace(begun, sample=launch_sampling)

    def settle(self, left: int = 0) -> None:
        """Wait until no more than `left` steps are launched, and compare their results."""
        while len(self._running) > left:
            following = self._running.pop(0)
            following.event.wait()
            expected, output = following.expected, following.output
            assert torch.equal(expected.tokens, output.tokens)
            verified = expected.verified, output.verified
            assert (verified[0] is None) == (verified[1] is None)
            for one, other in () if None in verified else (verified,):
                assert torch.equal(one, other)

    def _follow(self, step: Step) -> "Following":
        self.settle(left=2)  # the first rank has finished all steps but two
        self.seen |= set(_features(step))
        block = np.empty(block_bytes(step), np.uint8)
        header = msgspec.msgpack.encode(encode(step, block))
        assert len(header) < HEADER_BYTES
        sent = np.frombuffer(bytearray(block.tobytes()), np.uint8)
        block[:] = 0xFF
        received = decode(msgspec.msgpack.decode(header, type=Launch), sent, self._adapters.hold)
        check_same(step, received)
        output = StepOutput()
        event = self._second.launch(received, SecondSampling(self._wire), output)
        self._running.append(Following(event, output))
        return self._running[-1]


def check_same(one: Any, other: Any) -> None:
    """Compare all fields of two steps, except the pixels of images."""
    if one is other or isinstance(one, Image):
        return
    if isinstance(one, VisibleImage):
        assert (one.place, one.last - one.first) == (other.place, other.last - other.first)
    elif isinstance(one, (Tensor, np.ndarray)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other)
    elif is_dataclass(one) or isinstance(one, msgspec.Struct):
        assert type(one) is type(other)
        for each in fields(one) if is_dataclass(one) else msgspec.structs.fields(one):
            check_same(getattr(one, each.name), getattr(other, each.name))
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            check_same(*pair)
    else:
        assert one == other


def _features(step: Step) -> Iterable[str]:
    """Return the names of the features of a step."""
    rows, speculated, heads = step.rows, step.speculated, step.heads
    has = {
        "swap out": step.swap_out is not None,
        "swap in": step.swap_in is not None,
        "graph": step.graph,
        "early rows": bool(speculated.early),
        "drafts": speculated.most > 0,
        "drafts of the device": speculated.num_guessed > 0,
        "adapters": bool(step.adapter_columns),
        "fills": () if step.adapters is None else step.adapters.fills,
        "only pooled": not heads.chosen,
        "prompt logprobs": heads.num_prompt,
        "token scores": len(heads.scored),
    }
    if rows is not None:
        has |= {
            "chunk": rows.num_rows > rows.num_decodes,
            "mixed": rows.num_rows > rows.num_decodes > 0,
            "decode": rows.num_rows == rows.num_decodes,
            "windows": len(rows.locations) > 1,
            "states": rows.state_writes.size,
            "kept states": (rows.state_kept >= 0).any(),
            "images": rows.seen,
            "rotary positions of images": rows.positions.ndim > 1,
        }
    return [name for name, there in has.items() if there]


class Serving(SchedulerRole):
    """A role that has only a scheduler, on two ranks."""

    def __init__(self, config: EngineConfig, recorder: Any = None) -> None:
        super().__init__()
        self.use(engine := build(config), config)
        layout, device, wire = engine.shape.layout, engine.model.device, Wire()
        self.pools = (
            KVPool(layout, engine.shape.num_pages, device),
            HostPool(layout, engine.shape.num_host_pages, device),
        )
        for pool in (engine.pool, engine.backend.host_pool, *self.pools):
            pool.tensor.fill_(0xFF)  # NaN
        model: Any = engine.model
        copied: Model = copy.copy(model)
        if model.seeing is not None:
            model.seeing, copied.seeing = SendingTower(model.seeing, wire), ReceivingTower(wire)
        runner, self._stream = engine.runner, WorkerStream()
        bank = bank_of(config.lora, model, free=1 << 40)
        sizes = replace(runner.builder.sizes(model.spec), sampling_bytes=0)
        first = runner.forwards.with_host_pool(engine.backend.host_pool, recorder)
        second = Forwards(copied, *self.pools, bank, self._stream, sizes, recorder)
        self.ranks = TwoRanks(first, second, wire, engine)
        mine = ModelRunner(runner.builder, self.ranks)  # type: ignore[arg-type]
        for shape in mine.graph_shapes:
            mine.capture(shape)
        self.loop = EventLoop(self, mine)

    def run(self) -> None:
        """Run until all requests have ended, and compare the memory of the two ranks."""
        in_flight = None
        while self.scheduler.has_work or in_flight is not None:
            in_flight = self.loop.step(in_flight)
        self.ranks.settle()
        assert self.ended == self.added
        for ours, theirs in zip(
            (self.engine.pool, self.engine.backend.host_pool), self.pools, strict=True
        ):
            assert torch.equal(ours.tensor, theirs.tensor)

    def close(self) -> None:
        self._stream.close()
        self.engine.close()


def serve_pooled(serving: Serving) -> None:
    for number, pooling in enumerate(EVERY_POOLING):
        serving.add(prompt(40, number), sampling=sampled(max_tokens=1), pooling=pooling)
    serving.run()
    serve_text(serving)


def serve_labels(serving: Serving) -> None:
    for number in range(3):
        pooling = PoolingParams(PoolingMode.LABELS)
        serving.add(prompt(30, number), sampling=sampled(max_tokens=1), pooling=pooling)
    serving.run()


def serve_shared(serving: Serving) -> None:
    """Serve requests that continue from states in the prefix cache."""
    serve_text(serving)
    serve_text(serving)


def serve_images(serving: Serving) -> None:
    for number, parts in enumerate(
        (
            ("see ", picture(3, 5, 1), " and then"),
            ("x" * 20, picture(6, 6, 2), "y", picture(2, 2, 3)),
        )
    ):
        tokens, images = with_images(*parts)
        serving.add(tokens, images=images, sampling=EVERY_SAMPLING[number])
    serving.add(prompt(20), sampling=sampled())
    serving.run()


def vision(root: Path) -> dict[str, Any]:
    speculative = SpeculativeConfig(method="ngram", adaptive=False, prompt_lookup_min=1)
    return {"model": str(make_vision_checkpoint(root)), "speculative": speculative}


@dataclass(frozen=True)
class Case:
    make: Make
    serve: Callable[[Serving], None]
    has: set[str]
    num_pages: int = NUM_PAGES


COPIES = {"swap out", "swap in"}
DRAFTS = {"drafts", "early rows", "late sampling", "mixed"}
GUESSED = {*DRAFTS, "drafts of the device"}
STATES = {"states", "kept states"}
CASES = {
    "dense": Case(
        plain("qwen3"),
        serve_pooled,
        {"chunk", "mixed", "decode", "late sampling", "prompt logprobs"}
        | {"only pooled", "token scores", *COPIES},
    ),
    "pooled beside others": Case(
        plain("llama"),
        partial(serve_every_sampling, pooled=True),
        {"token scores", "prompt logprobs", "mixed"},
    ),
    "classifier": Case(
        plain("llama", made_by=AutoModelForSequenceClassification, num_labels=3, pad_token_id=0),
        serve_labels,
        {"only pooled"},
    ),
    "windows": Case(plain("gemma3_text"), serve_text, {"windows", "mixed", *COPIES}, 70),
    "ngram": Case(drafted("ngram", "llama"), serve_text, {*DRAFTS, *COPIES}),
    "mtp": Case(drafted("mtp", "deepseek_v3", make_mtp), serve_text, GUESSED),
    "draft model": Case(drafted("draft_model", "llama", make_draft), serve_text, GUESSED),
    "states": Case(plain("qwen3_next"), serve_shared, {*STATES, *COPIES, "mixed"}, 44),
    "states with drafts": Case(
        drafted("mtp", "qwen3_5_text", make_hybrid_mtp), serve_shared, {*STATES, *GUESSED}, 44
    ),
    "images": Case(
        vision, serve_images, {"images", "rotary positions of images", "drafts", "early rows"}
    ),
    "adapters": Case(adapted(*"abc"), serve_adapters, {"adapters", "fills", "mixed"}),
}


# Together these have nearly every field of a step. The others take a minute.
QUICK = ("dense", "windows", "ngram", "images", "adapters")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CASES]
)
def test_a_second_rank_runs_every_step_from_its_bytes(name: str, tmp_path: Path) -> None:
    """The comparison of steps and memory fails if a field of a step is not encoded."""
    case = CASES[name]
    config = config_of(1, case.num_pages, **case.make(tmp_path))
    with contextlib.closing(Serving(config)) as serving:
        case.serve(serving)
    assert case.has <= serving.ranks.seen


def test_a_second_rank_replays_the_same_graphs(tmp_path: Path) -> None:
    config = config_of(**plain()(tmp_path))
    with contextlib.closing(Serving(config, RepeatRecorder())) as serving:
        serve_text(serving)
    assert {"graph", "mixed"} <= serving.ranks.seen
