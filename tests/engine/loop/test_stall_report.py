"""The watchdog ends an engine process whose loop makes no progress."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from common import logs
from common.config import EngineConfig, SchedulerConfig
from common.requests.timeline import RequestTrace, TimelineEvent
from engine.loop.step_clock import StepClock
from node.runtime import drive
from tests.support.processes import fork_server

BROKEN = "broken"


class Stuck:
    scheduler = SimpleNamespace(awaits_steps=False)

    def poll(self) -> None:
        threading.Event().wait()

    def queues(self) -> dict[str, int]:
        return {"waiting": 0, "transfer": 2}

    def handoffs(self) -> Iterator[dict[str, object]]:
        yield {"queue": "transfer", "request_id": "the first", "producer": "p0:1"}
        yield {"queue": "transfer", "request_id": "the second", "producer": "p1:1"}
        if BROKEN in sys.argv:
            raise RuntimeError("books in disorder")

    def flights(self, num_ended: int) -> Iterator[tuple[str, RequestTrace]]:
        events = TimelineEvent(0.0, "submitted"), TimelineEvent(0.25, "opened", "at p0:1")
        for number in range(400):
            yield f"flight {number}", RequestTrace(9.0, events)
        yield "the first", RequestTrace(9.0, events)


def _ended(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return fork_server.run(__spec__.name, *arguments)


def test_the_log_has_all_queues_every_hand_off_and_every_stack():
    """Seen failing if `end_process` does nothing: it never ends."""
    ended = _ended()
    assert ended.returncode == 1
    assert "engine stalled, terminating" in ended.stderr
    assert "waiting=0 transfer=2" in ended.stderr
    for name, producer in (("the first", "p0:1"), ("the second", "p1:1")):
        assert f'queue=transfer request_id="{name}" producer={producer}' in ended.stderr
    assert "in poll" in ended.stderr
    assert 'events="0.000 submitted; 0.250 opened"' in ended.stderr
    assert 'request_id="the first" began_ago_s=9' in ended.stderr  # the last ones are logged
    assert 'request_id="flight 0"' not in ended.stderr


def test_the_process_ends_even_if_the_report_fails():
    ended = _ended(BROKEN)
    assert ended.returncode == 1
    assert "engine stalled, terminating" in ended.stderr


if __name__ == "__main__":
    logs.setup("engine", "info", "text")
    config = EngineConfig(model="m", scheduler=SchedulerConfig(watchdog_timeout_s=0.2))
    drive(
        cast(Any, Stuck()),
        cast(Any, SimpleNamespace(runner=None, stream=None)),
        config,
        StepClock(),
    )
