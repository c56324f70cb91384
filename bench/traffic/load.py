"""Load generation in a closed or an open loop, with the cost of the client itself.

An open loop never waits for the server. Each request has a due time, and any delay of its sending
is part of its latency. Independent of HTTP.
"""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.statistics import distribution
from bench.traffic.outcome import RequestOutcome
from bench.traffic.workload import WorkloadRequest

Ask = Callable[[WorkloadRequest, float, float], Awaitable[RequestOutcome]]  # job, start, due
_TICK_S = 0.02


@dataclass(slots=True)
class LoadRun:
    """One load on one system. Complete only when `ended` is set."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    begun: int = 0  # requests; those without an outcome were cancelled
    ended: float | None = None  # seconds from its start
    client_cpu: float = 0.0  # share of one core
    client_lag: dict[str, Any] = field(default_factory=dict)  # seconds; delay of our own timers

    @property
    def wall_s(self) -> float:
        """Return the seconds from the start to the end of the last response."""
        return max((outcome.ended for outcome in self.outcomes), default=0.0)


class LoadGenerator:
    """A load that sends jobs and collects outcomes into `run`.

    Outcomes are added as they arrive, so that a cancelled load keeps them. The loops run inside
    `measuring`, several at once if needed. Not thread-safe: one event loop only.
    """

    def __init__(
        self, ask: Ask, on_outcome: Callable[[RequestOutcome], None] = lambda _: None
    ) -> None:
        self._ask = ask
        self._on_outcome = on_outcome
        self._start = 0.0
        self.run = LoadRun()

    @contextlib.asynccontextmanager
    async def measuring(self) -> AsyncIterator[None]:
        """Measure the run's time and the client's own cost until the block ends."""
        self._start, cpu = time.perf_counter(), time.process_time()
        lags: list[float] = []
        ticking = asyncio.create_task(_tick(lags))
        try:
            yield
            self.run.ended = self._now()
        finally:
            ticking.cancel()
            self.run.client_cpu = (time.process_time() - cpu) / max(self._now(), 1e-9)
            self.run.client_lag = distribution(lags)

    async def closed_loop(
        self,
        jobs: Iterator[WorkloadRequest],
        *,
        concurrency: int,
        requests: int | None = None,
        duration_s: float | None = None,
        ends: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run `concurrency` callers with one request in flight each.

        No request starts after `requests`, after `duration_s`, or once `ends` returns True. Waits
        for the requests in flight.
        """
        last = math.inf if duration_s is None else duration_s
        jobs = itertools.islice(jobs, requests)

        async def caller() -> None:
            while self._now() < last and not ends():
                job = next(jobs, None)
                if job is None:
                    return
                await self._one(job, self._now())

        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(caller())

    async def open_loop(
        self, jobs: Iterator[WorkloadRequest], due: Iterable[float], *, max_in_flight: int
    ) -> None:
        """Send each job at its due time (seconds from the start) and wait for all responses.

        A job is sent late while `max_in_flight` requests are in flight.
        """
        room = asyncio.Semaphore(max_in_flight)

        async def call(job: WorkloadRequest, at: float) -> None:
            try:
                await self._one(job, at)
            finally:
                room.release()

        async with asyncio.TaskGroup() as calls:
            for at, job in zip(due, jobs, strict=False):
                await self._until(at)
                await room.acquire()
                calls.create_task(call(job, at))

    async def _until(self, at: float) -> None:
        """Sleep until `at`. Never returns early, unlike one sleep: uvloop rounds to
        milliseconds."""
        left = at - self._now()
        while left > 0:
            await asyncio.sleep(left)
            left = at - self._now()

    async def _one(self, job: WorkloadRequest, due: float) -> None:
        self.run.begun += 1
        outcome = await self._ask(job, self._start, due)
        self.run.outcomes.append(outcome)
        self._on_outcome(outcome)

    def _now(self) -> float:
        return time.perf_counter() - self._start


async def _tick(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        lags.append(max(0.0, time.perf_counter() - before - _TICK_S))


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield due times of arrivals at `rate` a second, without end. The seed determines them."""
    rng, at = np.random.default_rng((seed, 1)), 0.0
    while True:
        at += float(rng.exponential(1.0 / rate))
        yield at


def until(
    times: Iterable[float], *, count: int | None, duration_s: float | None
) -> Iterator[float]:
    """Yield at most `count` of the times, and none at or after `duration_s`."""
    for number, at in enumerate(times):
        if (count is not None and number >= count) or (duration_s is not None and at >= duration_s):
            return
        yield at
