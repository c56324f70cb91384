"""The product's scheduler, runner and loop over a model, with requests whose KV exists already.

Prefill is skipped: the pool holds random numbers, which do not change the time of a step. Wrappers
between the parts of the loop measure their time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from engine.runner.graphs import CudaRecorder
from engine.runner.runner import make_runner
from engine.runner.stream import DeviceStream, StreamEvent, open_stream
from engine.sampling.composition import every_feature
from engine.scheduler.results import StepOutcome
from engine.scheduler.scheduler import Scheduler
from tests.support.hardware.tapes import RepeatRecorder
from tools.bench.gpu.setting import Setting

PAGE_SIZE = 16


def make_pool(model: Model, num_pages: int) -> KVPool:
    """Make a KV pool with random numbers."""
    pool = KVPool(KVLayout.of(model.spec.layers, PAGE_SIZE, model.dtype), num_pages, model.device)
    pool.tensor.view(model.dtype).normal_()
    return pool


class StepMode(NamedTuple):
    """Options of an engine's steps. early: see `kernels/early_launch.py`."""

    graphs: bool
    overlap: bool
    early: bool = False


class DecodeEngine:
    """A running batch of requests of one length in an engine. `run` executes its steps.

    Args:
        context: tokens of each request when its first step begins.

    Attributes:
        times: the times of all steps since `forget`.
    """

    def __init__(
        self, setting: Setting, model: Model, pool: KVPool, batch: int, context: int, mode: StepMode
    ) -> None:
        longest, spec, tables = context + 1024, model.spec, pool.layout.tables
        config = SchedulerConfig(max_running_requests=batch, max_queued_requests=batch)
        core = EngineCore.make(
            EngineConfig(model="none", scheduler=config, cache=CacheConfig(prefix_cache=False)),
            CoreShape(tables, longest, pool.num_pages),
            RequestLimits(longest, spec.vocabulary_size, tables, pool.num_pages),
        )
        self.times = StepTimes(setting)
        self._stream = _TimedStream(open_stream(model.device), self.times)
        recorder = (RepeatRecorder() if setting.dry else CudaRecorder()) if mode.graphs else None
        runner = make_runner(
            model,
            pool,
            HostPool(pool.layout, 0, model.device),
            core.table,
            every_feature(core.table, spec.vocabulary_size, spec.eos_token_ids, model.device),
            no_adapters(core.table),
            self._stream,
            recorder,
        )
        if mode.graphs:
            runner.capture(GraphShape(batch, batch))
        self._role = _Role(Scheduler(config, core, lambda request, pages: None))
        timed = _TimedRunner(runner, self.times)
        self._loop = EventLoop(self._role, timed, overlap=mode.overlap)
        self._in_flight: LaunchedBatch | None = None
        rng = np.random.default_rng(0)
        for key in range(batch):
            self._join(random_request(key, rng, context, spec.vocabulary_size))

    def run(self, steps: int) -> None:
        """Launch `steps` steps, and finish the same number."""
        for _ in range(steps):
            self._in_flight = self._loop.step(self._in_flight)

    def tokens(self) -> NDArray[np.int32]:
        """Return the tokens since the first step, [finished steps, batch]."""
        return np.array(self._role.tokens)

    def close(self) -> None:
        if self._in_flight is not None:
            self._in_flight.result()
        self._stream.close()

    def _join(self, request: Request) -> None:
        num_pages, scheduler = -(-len(request.token_ids) // PAGE_SIZE), self._role.scheduler
        pages = scheduler.allocate(num_pages, PageHolder.REQUEST)
        if pages is None or not scheduler.join(request, PageHolding.of(pages)):
            raise RuntimeError("the pool has no room for the batch")


class StepTimes:
    """The times of steps, recorded by wrappers of the engine's parts.

    Attributes:
        launch_s: seconds of the engine thread to build and enqueue steps.
        wait_s: seconds of the engine thread to wait for their results.
    """

    def __init__(self, setting: Setting) -> None:
        self._clock = setting.clock
        self.forget()

    def forget(self) -> None:
        """Discard the times so far."""
        self.launch_s = self.wait_s = 0.0
        self._spans: list[tuple[Any, Any]] = []

    def on_device(self, work: Callable[[], None]) -> None:
        """Run a piece of the stream's work, and record when it begins and ends."""
        began = self._clock.stamp()
        work()
        self._spans.append((began, self._clock.stamp()))

    def idle_share(self) -> float:
        """Return the idle share of device time from the first step's start to the last's end.

        All submitted work must be complete.
        """
        (first, _), (_, last) = self._spans[0], self._spans[-1]
        busy = sum(self._clock.between(*span) for span in self._spans)
        return 1.0 - busy / self._clock.between(first, last)


class _TimedStream:
    def __init__(self, stream: DeviceStream, times: StepTimes) -> None:
        self._stream, self._times = stream, times

    def submit(self, work: Callable[[], None]) -> StreamEvent:
        return self._stream.submit(partial(self._times.on_device, work))

    def close(self) -> None:
        self._stream.close()


class _TimedRunner(NamedTuple):
    runner: BatchRunner
    times: StepTimes

    def launch(self, batch: ScheduleBatch) -> "_TimedStep":
        began = time.perf_counter()
        launched = self.runner.launch(batch)
        self.times.launch_s += time.perf_counter() - began
        return _TimedStep(launched, self.times)


@dataclass(frozen=True, eq=False)
class _TimedStep:
    launched: LaunchedBatch
    times: StepTimes

    @property
    def batch(self) -> ScheduleBatch:
        return self.launched.batch

    def sample(self) -> None:
        self.launched.sample()

    def result(self) -> BatchResult:
        began = time.perf_counter()
        result = self.launched.result()
        self.times.wait_s += time.perf_counter() - began
        return result


class _Role(SchedulingRole):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.tokens: list[NDArray[np.int32]] = []

    def finished(self, batch: ScheduleBatch, outcome: StepOutcome) -> None:
        self.tokens.append(outcome.tokens)
