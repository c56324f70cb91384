"""All measurements of one benchmark so far, in order.

What was under way when a bench is interrupted is in it too, marked as not complete.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.objectives import Objectives
from bench.progress import ProgressView
from bench.summary import RunWarning, summary, warnings
from bench.traffic.load import Ask, LoadGenerator, LoadRun
from bench.traffic.outcome import RequestOutcome


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    system: str  # "server", or an arm's name
    point: str  # "2 requests/s", "512 tokens"
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
    notes: list[str] = field(default_factory=list)  # failures, for the report's head
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
        on_outcome: Callable[[RequestOutcome], None] = lambda _: None,
    ) -> MeasuredRun:
        """Run one load on one system and record it.

        Args:
            drive: runs one of the load's loops.
            total: requests, if it is known.
        """
        with self.show.doing(f"{system}, {point}", total) as tick:

            def note(outcome: RequestOutcome) -> None:
                tick()
                on_outcome(outcome)

            load = LoadGenerator(ask, note)
            measured = MeasuredRun(system, point, x, repeat, load.run)
            self.measured.append(measured)
            async with load.measuring():
                await drive(load)
        return measured

    def warnings(self) -> list[str]:
        """Return the worst warning of each kind, with the number of others."""
        kinds: dict[str, list[RunWarning]] = {}
        for one in self.measured:
            stats = summary(one.run, self.objectives)
            for warned in warnings(one.name, one.run, stats):
                kinds.setdefault(warned.kind, []).append(warned)
        said = list(self.notes)
        for found in kinds.values():
            worst = max(found, key=lambda warned: warned.weight)
            more = len(found) - 1
            of = f" (and less so in {more} more of the {len(self.measured)} runs)" if more else ""
            said.append(worst.text + of)
        return said

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
