"""Measure the ITL of running responses while a long prompt is computed on the same node.

    python -m tools.bench.split_prefill [--rounds 3] [--prompt-tokens 8192]

Ways to compute the prompt: whole chunks, chunks with decode rows (mixed chunks), and layers in
groups between decode steps (split prefill) with several limits, which are multiples of a decode
step. Each way is an engine of its own in this process. They take turns on the same prompt. Times
are CPU times of the process, which computes in one thread, so that other work on the machine hardly
counts. Goal: ITL p99 at most 1.5 x the p50 of undisturbed decoding, at 85 % of the throughput of
whole chunks. In turns on one device, a group that is half as long as a decode step gets a third of
the time. The two goals therefore exclude each other, and the table shows both for each limit.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.steps import SchedulingRole, random_request
from common.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.batch.batch import BatchRunner, ForwardMode, LaunchedBatch, ScheduleBatch
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.build import Engine, build
from engine.loop.loop import EventLoop
from engine.loop.step_clock import StepClock
from engine.scheduler.results import StepOutcome
from engine.scheduler.scheduler import Scheduler
from tests.support.models.checkpoints import make_checkpoint
from tools.bench.support.record import emit, parsed, percentiles, say, show

SIZES: dict[str, Any] = {  # 54 million parameters
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
STREAMS = 8
STREAM_TOKENS = 256  # prompt tokens of running responses
WARM_UP_STEPS = 20
PAGE_SIZE = 16
SMALL_CHUNK = 64
WHOLE = {"mixed_chunk": False}
LIMITS = (8.0, 4.0, 2.0, 1.0, 0.5)  # limits of split prefill, in undisturbed decode steps


class Times(NamedTuple):
    """The times of one prompt, in seconds.

    Attributes:
        itl: times between two tokens of a response, during the prompt.
        prompt: time from the arrival of the prompt to its first token.
        work: time of the steps that computed only prompt tokens.
        undisturbed: median time between two tokens of a response. Mean of before and after the
            prompt, because responses grow in the meantime.
    """

    itl: Sequence[float]
    prompt: float
    work: float
    undisturbed: float


class _ClockedRole(SchedulingRole):
    """Records the time of each token by request key, and of the steps with prompt tokens alone."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.times: dict[int, list[float]] = defaultdict(list)
        self.prompt_s = 0.0
        self._before = time.process_time()

    def finished(self, batch: ScheduleBatch, outcome: StepOutcome) -> None:
        now = time.process_time()
        if batch.mode in (ForwardMode.EXTEND, ForwardMode.SPLIT):
            self.prompt_s += now - self._before
        self._before = now
        for key in outcome.requests.tolist():
            self.times[key].append(now)


class _BusyNode:
    """An engine with its loop, and STREAMS running responses."""

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        self._vocabulary = engine.core.limits.vocabulary_size
        clock = StepClock(time.process_time)
        self._scheduler = engine.scheduler(config, lambda request, pages: None)
        self._role = _ClockedRole(self._scheduler)
        runner: BatchRunner = engine.runner
        if config.scheduler.split_prefill_ms:
            runner = engine.split_runner(config.scheduler, self._scheduler, clock)
        self._loop = EventLoop(self._role, runner, clock=clock)
        self._in_flight: LaunchedBatch | None = None
        self._rng = np.random.default_rng(0)
        self._key = 0
        self._streams = [self._add(STREAM_TOKENS) for _ in range(STREAMS)]
        while not all(len(self._role.times[one.key]) > 1 for one in self._streams):
            self._run(1)
        self._run(WARM_UP_STEPS)

    def undisturbed_s(self, steps: int) -> float:
        """Return the median time between two tokens of a response."""
        before = self._mark()
        self._run(steps)
        return statistics.median(self._gaps(before))

    def prompt(self, num_tokens: int, steps: int) -> Times:
        """Compute a prompt, and end its request with the first token.

        Args:
            steps: undisturbed steps before and after it.
        """
        undisturbed = [self.undisturbed_s(steps)]
        role, before = self._role, self._mark()
        work_s, began = role.prompt_s, time.process_time()
        request = self._add(num_tokens)
        while not role.times[request.key]:
            self._run(1)
        prompt_s, work_s = role.times[request.key][0] - began, role.prompt_s - work_s
        self._run(1)  # a response may have waited for the last chunk
        itl = self._gaps(before)
        self._scheduler.abort(request, RequestEnd(FinishReason.ABORT))
        self._run(WARM_UP_STEPS)
        undisturbed.append(self.undisturbed_s(steps))
        return Times(itl, prompt_s, work_s, statistics.mean(undisturbed))

    def _add(self, num_tokens: int) -> Request:
        self._key += 1
        request = random_request(self._key, self._rng, num_tokens, self._vocabulary)
        self._scheduler.add(request)
        return request

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self._in_flight = self._loop.step(self._in_flight)

    def _mark(self) -> list[int]:
        return [len(self._role.times[one.key]) for one in self._streams]

    def _gaps(self, before: Sequence[int]) -> list[float]:
        gaps = list[float]()
        for one, first in zip(self._streams, before, strict=True):
            gaps.extend(np.diff(self._role.times[one.key][first - 1 :]).tolist())
        return gaps


def main() -> None:
    options = parsed(
        "split_prefill",
        __doc__,
        ("--rounds", 3, "rounds"),
        ("--prompt-tokens", 8192, "tokens of the prompt"),
        ("--steps", 100, "steps of undisturbed decoding"),
    )
    tokens, steps = options.prompt_tokens, options.steps
    with tempfile.TemporaryDirectory() as made:
        model = make_checkpoint(Path(made, "model"), dtype=torch.bfloat16, **SIZES)
        with _node(model, tokens, WHOLE) as first:
            step_s = first.undisturbed_s(steps)
        say(f"an undisturbed decode step of {STREAMS} responses: {step_s * 1e3:.1f} ms")
        ways = _ways(step_s)
        found: dict[str, list[Times]] = {way: [] for way in ways}
        for number in range(options.rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                with _node(model, tokens, ways[way]) as node:
                    node.prompt(tokens // 8, 2)  # warm-up
                    found[way].append(node.prompt(tokens, steps))
                say(f"round {number + 1}: {way}: {_said(found[way][-1])}")
    whole, *_ = found.values()
    rows = [_row(way, rounds, whole) for way, rounds in found.items()]
    show(rows)
    emit("split_prefill", vars(options), rows, step_ms=round(step_s * 1e3, 2))


def _ways(step_s: float) -> dict[str, dict[str, Any]]:
    """Return the scheduler's settings of each way. The first one is the reference."""
    ways: dict[str, dict[str, Any]] = {
        "whole chunks": WHOLE,
        "mixed chunks": {"mixed_chunk": True},
        f"mixed chunks of {SMALL_CHUNK}": {"chunked_prefill_tokens": SMALL_CHUNK},
    }
    for limit in LIMITS:
        ways[f"split, {limit:g} steps"] = {"split_prefill_ms": round(limit * step_s * 1e3, 3)}
    return ways


@contextmanager
def _node(model: Path, prompt_tokens: int, settings: dict[str, Any]) -> Iterator[_BusyNode]:
    longest = 2 * prompt_tokens
    pages = (STREAMS + 2) * longest // PAGE_SIZE
    config = EngineConfig(
        model=str(model),
        device="cpu",
        threads=1,
        context_length=longest,
        cache=CacheConfig(page_size=PAGE_SIZE, num_pages=pages, swap_pages=0, prefix_cache=False),
        scheduler=SchedulerConfig(**settings),
    )
    engine = build(config)
    try:
        yield _BusyNode(engine, config)
    finally:
        engine.close()


def _said(times: Times) -> str:
    itl_ms = percentiles(times.itl, 1e3)
    return (
        f"{times.undisturbed * 1e3:.1f} ms undisturbed, ITL p50 {itl_ms['p50']:.1f} ms, p99 "
        f"{itl_ms['p99']:.1f} ms, prompt {times.prompt:.2f} s, of which {times.work:.2f} s alone"
    )


def _row(way: str, rounds: Sequence[Times], whole: Sequence[Times]) -> dict[str, Any]:
    """Return medians over the rounds. Ratios are within one round."""
    p99s = [float(np.percentile(one.itl, 99)) / one.undisturbed for one in rounds]
    pairs = list(zip(whole, rounds, strict=True))
    return {
        "way": way,
        "itl_ms": percentiles((gap for one in rounds for gap in one.itl), 1e3),
        "p99_ratio": round(statistics.median(p99s), 3),
        "p99_least": round(min(p99s), 3),
        "p99_most": round(max(p99s), 3),
        "prompt_s": round(statistics.median(one.prompt for one in rounds), 3),
        "throughput": round(statistics.median(a.prompt / b.prompt for a, b in pairs), 3),
        # 0.0: this way has no steps with prompt tokens alone.
        "work": round(statistics.median(b.work and a.work / b.work for a, b in pairs), 3),
    }


if __name__ == "__main__":
    main()
