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

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from tests.support.checkpoints import make_checkpoint
from tools.bench.support.record import emit, percentiles, say, table

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
LIMITS = (8.0, 4.0, 2.0, 1.0, 0.5)  # limits of split prefill, in undisturbed decode steps
COLUMNS = {
    "way": "{way}",
    "ITL p50 ms": "{itl_ms[p50]:.1f}",
    "p99 ms": "{itl_ms[p99]:.1f}",
    "p99 / undisturbed p50": "{p99_ratio:.2f}",
    "from": "{p99_least:.2f}",
    "to": "{p99_most:.2f}",
    "prompt s": "{prompt_s:.2f}",
    "throughput": "{throughput:.0%}",
    "prompt work": "{work:.0%}",
}


@dataclass(frozen=True)
class Way:
    """A way to compute prompts beside running responses."""

    name: str
    settings: dict[str, Any]


@dataclass
class Measured:
    """The figures of one way, one entry for each round.

    Attributes:
        undisturbed_s: median time between two tokens of a response. Mean of before and after the
            prompt, because responses grow in the meantime.
        itl_s: times between two tokens of a response, during the prompt.
        prompt_s: time from the arrival of the prompt to its first token.
        work_s: time of the steps that computed only prompt tokens.
    """

    undisturbed_s: list[float] = field(default_factory=list)
    itl_s: list[list[float]] = field(default_factory=list)
    prompt_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)

    @property
    def newest(self) -> str:
        """Return the newest entries as text, in milliseconds and seconds."""
        itl_ms = percentiles(self.itl_s[-1], 1e3)
        return (
            f"{self.undisturbed_s[-1] * 1e3:.1f} ms undisturbed, ITL p50 {itl_ms['p50']:.1f} ms, "
            f"p99 {itl_ms['p99']:.1f} ms, prompt {self.prompt_s[-1]:.2f} s, of which "
            f"{self.work_s[-1]:.2f} s alone"
        )


class Role(SchedulingRole):
    """Records the times of tokens and steps. Requests are identified by key."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.times: dict[int, list[float]] = defaultdict(list)
        self.seconds: dict[ForwardMode, float] = defaultdict(float)
        self._before = time.process_time()

    def finished(self, batch: ScheduleBatch, outcome: StepOutcome) -> None:
        now = time.process_time()
        self.seconds[batch.mode] += now - self._before
        self._before = now
        for key in outcome.requests.tolist():
            self.times[key].append(now)


class Node:
    """An engine with its loop, and STREAMS running responses."""

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        self._vocabulary = engine.core.limits.vocabulary_size
        clock = StepClock(time.process_time)
        self._scheduler = engine.scheduler(config, lambda request, pages: None)
        self._role = Role(self._scheduler)
        runner: BatchRunner = engine.runner
        if config.scheduler.split_prefill_ms:
            runner = engine.split_runner(config.scheduler, self._scheduler, clock)
        self._loop = EventLoop(self._role, runner, clock=clock)
        self._in_flight: LaunchedBatch | None = None
        self._rng = np.random.default_rng(0)
        self._key = 0
        self._streams = [self.add(STREAM_TOKENS) for _ in range(STREAMS)]
        self._until(lambda: all(len(self._role.times[one.key]) > 1 for one in self._streams))
        self.run(WARM_UP_STEPS)

    def add(self, num_tokens: int) -> Request:
        self._key += 1
        request = random_request(self._key, self._rng, num_tokens, self._vocabulary)
        self._scheduler.add(request)
        return request

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._in_flight = self._loop.step(self._in_flight)

    def undisturbed_s(self, steps: int) -> float:
        """Return the median time between two tokens of a response."""
        before = self._mark()
        self.run(steps)
        return statistics.median(self._gaps(before))

    def prompt(self, num_tokens: int, measured: Measured) -> None:
        """Compute a prompt, and end its request with the first token."""
        role, before = self._role, self._mark()
        prompts = (ForwardMode.EXTEND, ForwardMode.SPLIT)
        work_s, began = sum(role.seconds[mode] for mode in prompts), time.process_time()
        request = self.add(num_tokens)
        self._until(lambda: role.times[request.key])
        measured.prompt_s.append(role.times[request.key][0] - began)
        measured.work_s.append(sum(role.seconds[mode] for mode in prompts) - work_s)
        self.run(1)  # a response may have waited for the last chunk
        measured.itl_s.append(self._gaps(before))
        self._scheduler.abort(request, RequestEnd(FinishReason.ABORT))
        self.run(WARM_UP_STEPS)

    def _mark(self) -> list[int]:
        return [len(self._role.times[one.key]) for one in self._streams]

    def _gaps(self, before: Sequence[int]) -> list[float]:
        gaps = list[float]()
        for one, first in zip(self._streams, before, strict=True):
            gaps.extend(np.diff(self._role.times[one.key][first - 1 :]).tolist())
        return gaps

    def _until(self, condition: Any) -> None:
        while not condition():
            self.run(1)


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as made:
        model = make_checkpoint(Path(made, "model"), dtype=torch.bfloat16, **SIZES)
        with _node(model, options, {"mixed_chunk": False}) as first:
            step_s = first.undisturbed_s(options.steps)
        say(f"an undisturbed decode step of {STREAMS} responses: {step_s * 1e3:.1f} ms")
        ways = _ways(step_s)
        measured = {way.name: Measured() for way in ways}
        for number in range(options.rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                _measure(way, model, options, measured[way.name])
                say(f"round {number + 1}: {way.name}: {measured[way.name].newest}")
    rows = [_row(way.name, measured[way.name], measured[ways[0].name]) for way in ways]
    table(rows, COLUMNS)
    emit("split_prefill", vars(options), rows, step_ms=round(step_s * 1e3, 2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.split_prefill", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100, help="of undisturbed decoding (100)")
    return parser.parse_args()


def _ways(step_s: float) -> list[Way]:
    return [
        Way("whole chunks", {"mixed_chunk": False}),
        Way("mixed chunks", {"mixed_chunk": True}),
        Way(f"mixed chunks of {SMALL_CHUNK}", {"chunked_prefill_tokens": SMALL_CHUNK}),
        *(Way(f"split, {limit:g} steps", _split(limit * step_s)) for limit in LIMITS),
    ]


def _split(limit_s: float) -> dict[str, Any]:
    return {"split_prefill_ms": round(limit_s * 1e3, 3)}


def _measure(way: Way, model: Path, options: argparse.Namespace, measured: Measured) -> None:
    with _node(model, options, way.settings) as node:
        node.prompt(options.prompt_tokens // 8, Measured())  # warm-up
        before_s = node.undisturbed_s(options.steps)
        node.prompt(options.prompt_tokens, measured)
        after_s = node.undisturbed_s(options.steps)
        measured.undisturbed_s.append(statistics.mean((before_s, after_s)))


@contextmanager
def _node(model: Path, options: argparse.Namespace, settings: dict[str, Any]) -> Iterator[Node]:
    longest = 2 * options.prompt_tokens
    config = EngineConfig(
        model=str(model),
        device="cpu",
        threads=1,
        context_length=longest,
        cache=CacheConfig(
            page_size=PAGE_SIZE,
            num_pages=(STREAMS + 2) * longest // PAGE_SIZE,
            swap_pages=0,
            prefix_cache=False,
        ),
        scheduler=SchedulerConfig(**settings),
    )
    engine = build(config)
    try:
        yield Node(engine, config)
    finally:
        engine.close()


def _row(name: str, measured: Measured, whole: Measured) -> dict[str, Any]:
    p99s = [
        float(np.percentile(itl, 99)) / undisturbed
        for itl, undisturbed in zip(measured.itl_s, measured.undisturbed_s, strict=True)
    ]
    return {
        "way": name,
        "itl_ms": percentiles((gap for itl in measured.itl_s for gap in itl), 1e3),
        "p99_ratio": round(statistics.median(p99s), 3),
        "p99_least": round(min(p99s), 3),
        "p99_most": round(max(p99s), 3),
        "prompt_s": round(statistics.median(measured.prompt_s), 3),
        "throughput": _ratio(whole.prompt_s, measured.prompt_s),
        "work": _ratio(whole.work_s, measured.work_s),
    }


def _ratio(whole_s: Sequence[float], own_s: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio of whole chunks' time to this way's.

    0.0: this way has no such time.
    """
    ratios = [whole / own if own else 0.0 for whole, own in zip(whole_s, own_s, strict=True)]
    return round(statistics.median(ratios), 3)


if __name__ == "__main__":
    main()
