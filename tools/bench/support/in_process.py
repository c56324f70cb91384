"""An engine in this process, with requests created in place."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.batch.batch import BatchResult, LaunchedBatch, ScheduleBatch
from engine.batch.request import Request
from engine.loop.loop import EventLoop
from engine.runner.runner import ModelRunner
from engine.scheduler.scheduler import Scheduler


@dataclass(eq=False)
class TellingRole:
    """A role that records each request's tokens."""

    scheduler: Scheduler
    told: dict[int, list[int]] = field(default_factory=dict)  # by request

    def poll(self) -> None:
        pass

    def next_batch(self) -> ScheduleBatch | None:
        return self.scheduler.next_batch()

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        outcome = self.scheduler.finish(batch, result)
        for request, token in zip(outcome.requests.tolist(), outcome.tokens.tolist(), strict=True):
            self.told.setdefault(request, []).append(token)

    def idle(self) -> None:
        raise AssertionError("there is work")


@dataclass(frozen=True, slots=True)
class Decoded:
    """The work between the moment all requests have their first token and the end of the last one.

    seconds: CPU time of this process.
    answers: by request, first tokens too.
    """

    seconds: float
    steps: int
    tokens: int
    answers: dict[int, list[int]]


def decode(runner: ModelRunner, scheduler: Scheduler, requests: Iterable[Request]) -> Decoded:
    """Run requests to their ends."""
    role = TellingRole(scheduler)
    loop = EventLoop(role, runner)
    in_flight: LaunchedBatch | None = None
    num_requests = 0
    for request in requests:
        scheduler.add(request)
        num_requests += 1
    while len(role.told) < num_requests:
        in_flight = loop.step(in_flight)
    tokens, steps = _count(role), scheduler.counters()["steps"]
    began = time.process_time()
    while scheduler.has_work or in_flight is not None:
        in_flight = loop.step(in_flight)
    return Decoded(
        time.process_time() - began,
        scheduler.counters()["steps"] - steps,
        _count(role) - tokens,
        role.told,
    )


def _count(role: TellingRole) -> int:
    return sum(map(len, role.told.values()))
