"""The product's scheduler, runner and loop over a model, with requests whose KV exists already.

Prefill is skipped: the pool holds random numbers, which do not change the time of a step. Wrappers
between the parts of the loop measure their time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bench.steps import SchedulingRole, random_request
from common.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.adapters.adapters import no_adapters
from engine.batch.batch import BatchResult, BatchRunner, LaunchedBatch, ScheduleBatch
from engine.batch.graph_shapes import GraphShape
from engine.batch.holding import PageHolding
from engine.batch.limits import RequestLimits
from engine.batch.request import Request
from engine.core import CoreShape, EngineCore
from engine.kv_cache.kv import HostPool, KVPool
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.pages import PageHolder
from engine.loop.loop import EventLoop
from engine.models import Model
from engine.runner.graphs import CudaRecorder, Recorder
from engine.runner.runner import make_runner
from engine.runner.stream import DeviceStream, StreamEvent, open_stream
from engine.sampling.choice_graphs import Graph
from engine.sampling.composition import every_feature
from engine.scheduler.results import StepOutcome
from engine.scheduler.scheduler import Scheduler
from tools.bench.gpu.clock import Clock
from tools.bench.gpu.setting import Setting

PAGE_SIZE = 16


def make_pool(model: Model, num_pages: int) -> KVPool:
    """Make a KV pool with random numbers."""
    pool = KVPool(KVLayout.of(model.spec.layers, PAGE_SIZE, model.dtype), num_pages, model.device)
    pool.tensor.view(model.dtype).normal_()
    return pool


@dataclass(frozen=True, slots=True)
class Way:
    """Options of an engine's steps. early: see `kernels/early_launch.py`."""

    graphs: bool
    overlap: bool
    early: bool = False


@dataclass(slots=True)
class Spent:
    """Seconds of the engine thread.

    launch: to build and enqueue steps. wait: to wait for their results.
    """

    launch: float = 0.0
    wait: float = 0.0


class DecodeEngine:
    """A running batch of requests of one length in an engine. `run` executes its steps.

    Args:
        context: tokens of each request when its first step begins.
    """

    def __init__(
        self, setting: Setting, model: Model, pool: KVPool, batch: int, context: int, way: Way
    ) -> None:
        longest = context + 1024
        spec, tables = model.spec, pool.layout.tables
        config = SchedulerConfig(max_running_requests=batch, max_queued_requests=batch)
        core = EngineCore.make(
            EngineConfig(model="none", scheduler=config, cache=CacheConfig(prefix_cache=False)),
            CoreShape(tables, longest, pool.num_pages),
            RequestLimits(longest, spec.vocabulary_size, tables, pool.num_pages),
        )
        table = core.table
        self._stream = TimedStream(open_stream(model.device), setting.clock)
        recorder = _recorder(setting) if way.graphs else None
        host_pool = HostPool(pool.layout, 0, model.device)
        features = every_feature(table, spec.vocabulary_size, spec.eos_token_ids, model.device)
        runner = make_runner(
            model, pool, host_pool, table, features, no_adapters(table), self._stream, recorder
        )
        if way.graphs:
            runner.capture(GraphShape(batch, batch))
        self._scheduler = Scheduler(config, core, lambda request, pages: None)
        self._role = _Role(self._scheduler)
        self._runner = _TimedRunner(runner)
        self._loop = EventLoop(self._role, self._runner, overlap=way.overlap)
        self._in_flight: LaunchedBatch | None = None
        rng = np.random.default_rng(0)
        for key in range(batch):
            self._join(random_request(key, rng, context, model.spec.vocabulary_size))

    def run(self, steps: int) -> None:
        """Launch `steps` steps, and finish the same number."""
        for _ in range(steps):
            self._in_flight = self._loop.step(self._in_flight)

    def forget(self) -> None:
        """Discard the measurements so far."""
        self._stream.spans.clear()
        self._runner.spent = Spent()

    @property
    def spent(self) -> Spent:
        return self._runner.spent

    def idle_share(self) -> float:
        """Return the idle share of device time from the first step's start to the last's end."""
        return self._stream.idle_share()

    def tokens(self) -> NDArray[np.int32]:
        """Return the tokens since the first step, [finished steps, batch]."""
        return np.array(self._role.tokens)

    def close(self) -> None:
        if self._in_flight is not None:
            self._in_flight.result()
        self._stream.close()

    def _join(self, request: Request) -> None:
        pages = self._scheduler.allocate(
            -(-len(request.token_ids) // PAGE_SIZE), PageHolder.REQUEST
        )
        if pages is None or not self._scheduler.join(request, PageHolding.of(pages)):
            raise RuntimeError("the pool has no room for the batch")


class TimedStream:
    """A stream that records when each piece of work begins and ends."""

    def __init__(self, stream: DeviceStream, clock: Clock) -> None:
        self.spans: list[tuple[Any, Any]] = []
        self._stream = stream
        self._clock = clock

    def submit(self, work: Callable[[], None]) -> StreamEvent:
        def timed() -> None:
            began = self._clock.stamp()
            work()
            self.spans.append((began, self._clock.stamp()))

        return self._stream.submit(timed)

    def close(self) -> None:
        self._stream.close()

    def idle_share(self) -> float:
        """Return the idle share. All submitted work must be complete."""
        (first, _), (_, last) = self.spans[0], self.spans[-1]
        busy = sum(self._clock.between(began, ended) for began, ended in self.spans)
        return 1.0 - busy / self._clock.between(first, last)


@dataclass(eq=False)
class _TimedRunner:
    runner: BatchRunner
    spent: Spent = field(default_factory=Spent)

    def launch(self, batch: ScheduleBatch) -> "_TimedLaunched":
        began = time.perf_counter()
        launched = self.runner.launch(batch)
        self.spent.launch += time.perf_counter() - began
        return _TimedLaunched(launched, self)


@dataclass(frozen=True, eq=False)
class _TimedLaunched:
    launched: LaunchedBatch
    runner: _TimedRunner

    @property
    def batch(self) -> ScheduleBatch:
        return self.launched.batch

    def sample(self) -> None:
        self.launched.sample()

    def result(self) -> BatchResult:
        began = time.perf_counter()
        result = self.launched.result()
        self.runner.spent.wait += time.perf_counter() - began
        return result


class _Role(SchedulingRole):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.tokens: list[NDArray[np.int32]] = []

    def finished(self, batch: ScheduleBatch, outcome: StepOutcome) -> None:
        self.tokens.append(outcome.tokens)


def _recorder(setting: Setting) -> Recorder:
    return _Echo() if setting.dry else CudaRecorder()


class _Echo:
    """A graph on a CPU: repeats the recorded calls into the same memory."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        output = work()
        return _Again(work, output), output


@dataclass(frozen=True, eq=False)
class _Again:
    work: Callable[[], Tensor]
    output: Tensor

    def replay(self) -> None:
        self.output.copy_(self.work())
