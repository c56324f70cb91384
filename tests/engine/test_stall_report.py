"""An engine process whose loop stands still is ended by its watchdog."""

import subprocess
import sys

STANDS_STILL = """
import threading
from types import SimpleNamespace

from common import logs
from common.config import EngineConfig, SchedulerConfig
from engine.loop.clock import StepClock
from node.runtime import drive
from common.requests.timeline import RequestTrace, TimelineEvent


class Stuck:
    scheduler = SimpleNamespace(awaits_steps=False)

    def poll(self):
        threading.Event().wait()

    def queues(self):
        return {"waiting": 0, "transfer": 2}

    def handoffs(self):
        yield {"queue": "transfer", "request_id": "the first", "producer": "p0:1"}
        yield {"queue": "transfer", "request_id": "the second", "producer": "p1:1"}
        {broken}

    def flights(self, num_ended):
        events = TimelineEvent(0.0, "submitted"), TimelineEvent(0.25, "opened", "at p0:1")
        for number in range(400):
            yield f"flight {number}", RequestTrace(9.0, events)
        yield "the first", RequestTrace(9.0, events)


logs.setup("engine", "info", "text")
config = EngineConfig(model="m", scheduler=SchedulerConfig(watchdog_timeout_s=0.2))
engine = SimpleNamespace(runner=None, stream=None)
drive(Stuck(), engine, config, StepClock())
"""


def _ended(broken: str = "") -> subprocess.CompletedProcess[str]:
    program = STANDS_STILL.replace("{broken}", broken)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=570, check=False
    )


def test_its_log_has_all_queues_every_handoff_and_every_stack():
    """Seen failing with `end_process` doing nothing: it never ends."""
    ended = _ended()
    assert ended.returncode == 1
    assert "engine stalled, terminating" in ended.stderr
    assert "waiting=0 transfer=2" in ended.stderr
    for name, producer in (("the first", "p0:1"), ("the second", "p1:1")):
        assert f'queue=transfer request_id="{name}" producer={producer}' in ended.stderr
    assert "in poll" in ended.stderr
    assert 'events="0.000 submitted; 0.250 opened"' in ended.stderr
    assert 'request_id="the first" began_ago_s=9' in ended.stderr  # the last ones are told
    assert 'request_id="flight 0"' not in ended.stderr


def test_it_ends_even_if_it_cannot_say_what_it_had():
    ended = _ended(broken='raise RuntimeError("books in disorder")')
    assert ended.returncode == 1
    assert "engine stalled, terminating" in ended.stderr
