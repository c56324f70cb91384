"""The main thread of an engine process, around the event loop."""

import threading
import time
from pathlib import Path

import pytest

from common.config import CacheConfig, EngineConfig, SchedulerConfig
from common.requests.timeline import RequestTrace
from engine.batch.batch import BatchResult, ScheduleBatch
from engine.build import build
from engine.loop.step_clock import StepClock
from engine.scheduler.scheduler import Scheduler
from node import runtime
from node.runtime import drive
from tests.support.engine.engine_rig import Rig
from tests.support.models.checkpoints import make_checkpoint

DEADLINE_S = 60.0
WATCHDOG_S = 0.2


class _Found(Exception):
    """Ends the loop."""


class _StandsStill:
    """A role that is idle for three limits of the watchdog. Then a request arrives, and is not
    computed until the watchdog would have ended the process."""

    def __init__(self, ended: threading.Event, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._ended = ended
        self._arrives = self._until = 0.0

    def poll(self) -> None:
        now = time.monotonic()
        if not self._until:
            self._arrives, self._until = now + 3 * WATCHDOG_S, now + DEADLINE_S
        if not self.scheduler.has_work:
            assert not self._ended.is_set(), "the watchdog ended an engine without work"
            if now >= self._arrives:
                self.scheduler.add(Rig().request([1, 2, 3]))
        elif self._ended.is_set():
            raise _Found
        assert now < self._until, "the watchdog did not see that the request is never computed"

    def next_batch(self) -> ScheduleBatch | None:
        return None

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        raise AssertionError("nothing was launched")

    def idle(self) -> None:
        time.sleep(0.001)

    def queues(self) -> dict[str, int]:
        return {}

    def handoffs(self) -> list[dict[str, object]]:
        return []

    def flights(self, num_ended: int) -> list[tuple[str, RequestTrace]]:
        return []


# Seen failing without the start of the watchdog, and if `has_work` is always False or always True.
def test_an_engine_without_progress_and_with_waiting_work_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(runtime, "end_process", ended.set)
    config = EngineConfig(
        model=str(make_checkpoint(tmp_path)),
        device="cpu",
        cache=CacheConfig(num_pages=16),
        scheduler=SchedulerConfig(watchdog_timeout_s=WATCHDOG_S),
    )
    engine, clock = build(config), StepClock()
    scheduler = engine.scheduler(config, lambda request, pages: None)
    with pytest.raises(_Found):
        drive(_StandsStill(ended, scheduler), engine, config, clock)
    engine.close()
