"""Load generation in a closed or an open loop, with the outcome of each request.

An open loop never waits for the server: each request has a due time, and a late sending counts as
latency. Independent of HTTP.
"""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from bench.statistics import distribution
from bench.traffic.workload import WorkloadRequest


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request. Times are seconds from the start of the run.

    A chunk is an event of the stream with at least one token.
    """

    group: str
    prompt_tokens: int  # as requested, later as in the server's usage
    due: float  # scheduled sending time, from which latencies count
    sent: float  # actual sending time
    chunks: list[float] = field(default_factory=list)  # arrival times
    chunk_tokens: list[int] = field(default_factory=list)  # tokens of each chunk, if reported
    output_tokens: int = 0  # from the server's usage, or the number of chunks
    cached_tokens: int = 0  # cached prompt tokens, if the server reports them
    usage_reported: bool = False
    ended: float = 0.0
    error: str = ""  # kind of error, from a small set. "": success
    detail: str = ""  # error message of the server or the system

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def late(self) -> float:
        """Return the seconds between due and sent: a delay of the client, or of its limit of
        requests in flight.
        """
        return self.sent - self.due

    @property
    def gaps(self) -> Sequence[float]:
        """Return the seconds between adjacent chunks, as a reader of the stream sees them."""
        return [b - a for a, b in pairwise(self.chunks)]

    @property
    def per_token(self) -> float | None:
        """Return the mean seconds per token after the first chunk, or None without a second."""
        after = self.output_tokens - (self.chunk_tokens[0] if self.chunk_tokens else 1)
        if len(self.chunks) < 2 or after < 1:
            return None
        return (self.chunks[-1] - self.chunks[0]) / after

    def record(self) -> dict[str, Any]:
        """Return the JSON record: all fields, times rounded to microseconds."""
        times = {name: round(getattr(self, name), 6) for name in ("due", "sent", "ended")}
        return asdict(self) | times | {"chunks": [round(time, 6) for time in self.chunks]}


Ask = Callable[[WorkloadRequest, float, float], Awaitable[RequestOutcome]]  # job, start, due
_TICK_S = 0.02


@dataclass(slots=True)
class LoadRun:
    """One load on one system. Complete only when `ended` is set."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    begun: int = 0  # requests. Those without an outcome were cancelled
    ended: float | None = None  # seconds from its start
    client_cpu: float = 0.0  # share of one core
    client_lag: dict[str, Any] = field(default_factory=dict)  # delay of its timers, seconds

    @property
    def wall_s(self) -> float:
        """Return the seconds from the start to the end of the last response."""
        return max((outcome.ended for outcome in self.outcomes), default=0.0)


class LoadGenerator:
    """Sends jobs and collects their outcomes into `run`.

    Outcomes are added as they arrive, so that a cancelled run keeps them. The loops run inside
    `measuring`, several at the same time if needed. For one event loop.
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
        """Measure the run's duration and the client's own cost until the block ends."""
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

        No request starts after `requests` requests, after `duration_s`, or once `ends` returns
        True. Waits for the requests in flight.
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

        While `max_in_flight` requests are in flight, jobs are sent late.
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
        """Sleep until `at`. Never returns early, although uvloop rounds to milliseconds."""
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
    """Yield due times of Poisson arrivals at `rate` per second, without end."""
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
