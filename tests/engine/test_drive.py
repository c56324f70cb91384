"""The main thread of an engine process, around the loop."""

import threading
import time
from pathlib import Path

import pytest

from common.config import CacheConfig, EngineConfig, SchedulerConfig
from common.engine.build import build
from common.engine.drive import drive
from common.engine.loop import last_words
from common.engine.loop.clock import StepClock
from common.engine.rows.batch import BatchResult, ScheduleBatch
from common.engine.schedule.scheduler import Scheduler
from common.requests.flight import Flight
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_rig import Rig

DEADLINE_S = 60.0


class _Found(Exception):
    """Ends the loop."""


class _StandsStill:
    """A role that does nothing until the process would have been ended."""

    def __init__(self, ended: threading.Event, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._ended = ended
        self._until = time.monotonic() + DEADLINE_S

    def poll(self) -> None:
        if self._ended.is_set():
            raise _Found
        assert time.monotonic() < self._until, "nobody has noticed"

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

    def flights(self, num_ended: int) -> list[tuple[str, Flight]]:
        return []


# Seen failing without the start of the watchdog.
def test_an_engine_that_stands_still_with_work_waiting_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(last_words, "end_process", ended.set)
    config = EngineConfig(
        model=str(make_checkpoint(tmp_path)),
        device="cpu",
        cache=CacheConfig(num_pages=16),
        scheduler=SchedulerConfig(watchdog_s=0.02),
    )
    engine, clock = build(config), StepClock()
    scheduler = engine.scheduler(config, lambda request, pages: None)
    scheduler.add(Rig().request([1, 2, 3]))
    with pytest.raises(_Found):
        drive(_StandsStill(ended, scheduler), engine, config, clock)
    engine.close()
