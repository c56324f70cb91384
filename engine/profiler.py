"""Profiling of some steps with torch's profiler, when an operator requests it.

The trace is for Perfetto and chrome://tracing. Profiling starts and stops on the forward stream,
between two steps. A separate thread writes the trace. Profiling ends after its number of steps or
its time limit.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from common.errors import FailedPrecondition, Overloaded
from engine.runner.stream import DeviceStream, StreamEvent

LONGEST_S = 60.0


class Profiler:
    """The profiler of an engine. Engine thread only.

    Args:
        directory: directory of the traces. None: profiling is disabled.
        name: prefix of the file names.
        num_steps: returns the number of steps finished since the start.
    Attributes:
        notify: called by another thread when a trace is written.
    """

    def __init__(
        self,
        directory: Path | None,
        name: str,
        stream: DeviceStream,
        device: torch.device,
        num_steps: Callable[[], int],
    ) -> None:
        self._directory = directory
        self._name = name
        self._stream = stream
        self._num_steps = num_steps
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._writer = ThreadPoolExecutor(1, "profiler")
        self._running: profile | None = None
        self._begun: StreamEvent
        self._until = (0, 0.0)  # step number, time.monotonic()
        self._path = ""
        self._written: Future[str] | None = None  # the latest trace
        self.notify: Callable[[], None] = lambda: None

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def start(self, num_steps: int) -> str:
        """Start before the next step. Return the path of the trace file.

        Raises:
            FailedPrecondition: no directory is configured.
            Overloaded: a trace is in progress.
        """
        if self._directory is None:
            raise FailedPrecondition("this node has no engine.profile_dir")
        if not self._directory.is_dir():
            raise FailedPrecondition("engine.profile_dir is no directory")
        if self._running is not None or (self._written is not None and not self._written.done()):
            raise Overloaded("a profile is already running")
        moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        path = self._directory / f"{self._name}-{os.getpid()}-{moment}.json.gz"
        self._path = str(path)
        self._running = running = profile(activities=self._activities)
        self._written = None
        self._begun = self._stream.submit(running.start)
        self._until = self._num_steps() + num_steps, time.monotonic() + LONGEST_S
        return self._path

    def poll(self) -> None:
        """End the trace after its number of steps or its time limit."""
        num_steps, until = self._until
        if self._running is not None and (
            self._num_steps() >= num_steps or time.monotonic() >= until
        ):
            self._end(self._running)

    def stop(self) -> Future[str]:
        """End the trace if it is in progress. Return the file of the latest trace, once it is
        written.

        Raises:
            FailedPrecondition: no trace was started.
        """
        if self._running is not None:
            self._end(self._running)
        if self._written is None:
            raise FailedPrecondition("no profile is running")
        return self._written

    def close(self) -> None:
        """Close without waiting for a trace that is being written."""
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _end(self, running: profile) -> None:
        ended = self._stream.submit(running.stop)
        self._written = self._writer.submit(_write, running, (self._begun, ended), self._path)
        self._written.add_done_callback(lambda _: self.notify())
        self._running = None


def _write(profiled: profile, events: tuple[StreamEvent, ...], path: str) -> str:
    for event in events:
        event.wait()
    try:
        profiled.export_chrome_trace(path)
    except (OSError, RuntimeError) as error:
        raise FailedPrecondition(f"the trace cannot be written: {error}") from error
    return path
