"""A second rank runs every step of the first one from bytes, and has the same pages."""

import contextlib
import copy
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
from engine.batch.images import VisibleImage
from engine.build import build
from engine.kv_cache.kv import HostPool, KVPool
from engine.loop.loop import EventLoop
from engine.models.vision.seeing import ReceivingTower
from engine.runner.forwards import BegunStep, Forwards
from engine.runner.launch_message import block_bytes
from engine.runner.ranked import LeadingForwards
from engine.runner.runner import ModelRunner
from engine.runner.step import Step, StepOutput
from engine.runner.stream import StreamEvent, WorkerStream
from tests.support.engine.scheduler_role import (
    EVERY_POOLING,
    EVERY_SAMPLING,
    NUM_PAGES,
    Make,
    SchedulerRole,
    adapted,
    config_of,
    drafted,
    given,
    plain,
    prompt,
    sampled,
    serve_adapters,
    serve_every_sampling,
    serve_given,
    serve_text,
)
from tests.support.engine.thread_ranks import PATIENCE_S, Meeting, ThreadGroup, followed
from tests.support.hardware.tapes import RepeatRecorder
from tests.support.models.drafters import make_draft, make_hybrid_mtp, make_mtp
from tests.support.models.vision import make_vision_checkpoint, picture, with_images


class Sending(LeadingForwards):
    """The forwards of rank 0, which keep the steps that they have sent."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sent: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self.followed: queue.SimpleQueue[StreamEvent] = queue.SimpleQueue()
        self._num_open = 0
        self.seen: set[str] = set()

    def launch_forward(self, step: Step, sampling: Any) -> BegunStep:
        self.seen.add("late sampling")
        return super().launch_forward(step, sampling)

    def _send(self, step: Step) -> None:
        self.seen |= set(_features(step))
        self.sent.put(step)
        self._num_open += 1
        super()._send(step)
        sender: Any = self._followers
        assert 0 <= block_bytes(step) - sender.header.block_bytes < 16  # up to the next alignment

    def settle(self) -> None:
        """Wait until the follower has run all steps."""
        while self._num_open:
            self.followed.get(timeout=PATIENCE_S).wait()
            self._num_open -= 1


class Following(Forwards):
    """The forwards of a follower, which compare each step with the one that was sent."""

    sending: Sending

    def launch(self, step: Step, sampling: Any, output: StepOutput) -> StreamEvent:
        check_same(self.sending.sent.get(timeout=PATIENCE_S), step)
        event = super().launch(step, sampling, output)
        self.sending.followed.put(event)
        return event


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
        layout, device, meeting = engine.shape.layout, engine.model.device, Meeting(2)
        self.pools = (
            KVPool(layout, engine.shape.num_pages, device),
            HostPool(layout, engine.shape.num_host_pages, device),
        )
        for pool in (engine.pool, engine.backend.host_pool, *self.pools):
            pool.tensor.fill_(0xFF)  # NaN
        model: Any = engine.model
        copied: Any = copy.copy(model)
        if model.seeing is not None:
            model.seeing._group, copied.seeing = ThreadGroup(0, meeting), None
            copied.receiving = ReceivingTower(ThreadGroup(1, meeting), 0)
        runner = engine.runner
        bank = bank_of(config.lora, model, free=1 << 40)
        sizes = replace(runner.builder.sizes(model.spec), sampling_bytes=0)
        first: Any = runner.forwards.with_host_pool(engine.backend.host_pool, recorder)
        self._exits = contextlib.ExitStack()
        self._exits.callback(engine.close)
        stream = self._exits.enter_context(contextlib.closing(WorkerStream()))
        second = Following(copied, *self.pools, bank, stream, sizes, recorder)
        jobs: Any = SimpleNamespace(adapter=engine.adapters.library.hold)
        self.ranks, _ = self._exits.enter_context(followed(first, second, meeting, jobs, Sending))
        second.sending = self.ranks
        mine = ModelRunner(runner.builder, self.ranks)
        for shape in mine.graph_shapes:
            mine.capture(shape)
        self.loop = EventLoop(self, mine)

    def run(self) -> None:
        """Run until all requests have ended, and compare the memory of the two ranks."""
        super().run()
        self.ranks.settle()
        assert self.ended == self.added
        for ours, theirs in zip(
            (self.engine.pool, self.engine.backend.host_pool), self.pools, strict=True
        ):
            assert torch.equal(ours.tensor, theirs.tensor)

    def close(self) -> None:
        self._exits.close()


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
    "input embeddings": Case(given, serve_given, {"images", "mixed"}, 40),
    "adapters": Case(adapted(*"abc"), serve_adapters, {"adapters", "fills", "mixed"}),
}


# Together these have nearly every field of a step. The others take a minute.
QUICK = ("dense", "windows", "ngram", "images", "input embeddings", "adapters")


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
