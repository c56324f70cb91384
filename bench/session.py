"""All measurements of one benchmark so far, in order, and its progress on stderr.

A run that an interrupt ends is included, marked as incomplete.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.summary import Objectives, RunWarning, summary, warnings
from bench.traffic.load import Ask, LoadGenerator, LoadRun
from bench.traffic.workload import WorkloadRequest


class ProgressView:
    """A progress display. Use as a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(console=self._console, disable=not self._console.is_terminal)

    def __enter__(self) -> "ProgressView":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def plan(self, what: str, total: int) -> Callable[[], None]:
        """Show a bar for the whole session. Call the returned function after each step."""
        task = self._progress.add_task(what, total=total)
        return lambda: self._progress.advance(task)

    @contextmanager
    def doing(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show a bar while the block runs.

        Call the yielded function after each of `total` steps (None: unknown).
        """
        if not self._console.is_terminal:
            self.say(f"{what} ...")
        task = self._progress.add_task(what, total=total)
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self._progress.remove_task(task)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    system: str  # "server", or the name of a compared system
    point: str  # load level: "2 requests/s", "512 tokens"
    x: float  # the point as a number, for plots
    repeat: int
    run: LoadRun

    @property
    def name(self) -> str:
        return f"{self.system}, {self.point}"


@dataclass(slots=True)
class Session:
    show: ProgressView
    objectives: Objectives
    measured: list[MeasuredRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # failures, for the top of the report
    interrupted: bool = False

    async def measure(
        self,
        ask: Ask,
        drive: Callable[[LoadGenerator], Awaitable[None]],
        *,
        system: str,
        point: str,
        x: float,
        repeat: int = 0,
        total: int | None = None,
    ) -> None:
        """Run one load on one system and record it.

        Args:
            drive: runs one of the generator's loops.
            total: number of requests, if known.
        """
        with self.show.doing(f"{system}, {point}", total) as tick:
            load = LoadGenerator(ask, lambda _: tick())
            self.measured.append(MeasuredRun(system, point, x, repeat, load.run))
            async with load.measuring():
                await drive(load)

    async def rehearse(
        self,
        what: str,
        ask: Ask,
        jobs: Iterator[WorkloadRequest],
        *,
        concurrency: int,
        requests: int | None = None,
        duration_s: float | None = None,
    ) -> LoadRun:
        """Run a closed loop to warm up or to calibrate. The report does not contain it."""
        with self.show.doing(what, requests) as tick:
            load = LoadGenerator(ask, lambda _: tick())
            async with load.measuring():
                await load.closed_loop(
                    jobs, concurrency=concurrency, requests=requests, duration_s=duration_s
                )
        return load.run

    def warnings(self) -> list[str]:
        """Return the worst warning of each kind, with the number of others."""
        kinds: dict[str, list[RunWarning]] = {}
        for one in self.measured:
            for found in warnings(one.name, one.run, summary(one.run, self.objectives)):
                kinds.setdefault(found.kind, []).append(found)
        texts = list(self.notes)
        for alike in kinds.values():
            worst = max(alike, key=lambda found: found.weight)
            more = f" (also in {len(alike) - 1} more of the {len(self.measured)} runs)"
            texts.append(worst.text + (more if len(alike) > 1 else ""))
        return texts

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON record of every run, with all data of every request."""
        for one in self.measured:
            yield {
                "system": one.system,
                "point": one.point,
                "x": one.x,
                "repeat": one.repeat,
                "summary": summary(one.run, self.objectives),
                "outcomes": [outcome.record() for outcome in one.run.outcomes],
            }
