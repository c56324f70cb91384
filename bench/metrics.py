"""The metrics of a comparison, and ratios of two systems over paired repeats."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.session import MeasuredRun, Session
from bench.statistics import Ratio, ratio
from bench.summary import summary

Value = Callable[[MeasuredRun, Mapping[str, Any]], float | None]  # of a run and its summary


@dataclass(frozen=True, slots=True)
class Metric:
    key: str
    name: str
    value: Value
    unit: str = "ms"
    scale: float = 1e3  # from what `value` gives to `unit`
    lower_is_better: bool = True
    # Minimum value in ratios, so that a value of 0 is not left out.
    floor: Value = lambda one, stats: 0.0

    def word(self, verdict: str) -> str:
        """Return the meaning of a Ratio's verdict for this metric: better, worse or undecided."""
        if verdict == "undecided":
            return verdict
        return "better" if (verdict == "lower") == self.lower_is_better else "worse"


def percentile(of: str, which: str) -> Value:
    """Return a function for one percentile of one of a summary's distributions."""
    return lambda _, stats: stats[of][which]


def _met_per_s(_: MeasuredRun, stats: Mapping[str, Any]) -> float | None:
    return stats["goodput"]["requests_per_s"] if stats["goodput"] else None


GOODPUT = Metric(
    "goodput",
    "goodput",
    _met_per_s,
    unit="requests/s",
    scale=1.0,
    lower_is_better=False,
    floor=lambda one, stats: 0.5 / max(one.run.wall_s, 1e-9),  # half a request in the whole run
)
GOODPUT_FLOOR = (
    "In a ratio of goodputs a run without one good request counts as if it had half a one."
)


@dataclass(frozen=True, slots=True)
class Spread:
    """One metric of one system at one point, over repeats."""

    values: Mapping[int, float]  # by repeat
    floors: Mapping[int, float]

    @property
    def middle(self) -> float | None:
        return median(self.values.values()) if self.values else None

    @property
    def low(self) -> float | None:
        return min(self.values.values(), default=None)

    @property
    def high(self) -> float | None:
        return max(self.values.values(), default=None)

    def paired(self, other: "Spread") -> dict[int, tuple[float, float]]:
        """Return the value pairs for a ratio, by repeat.

        Includes only repeats that both systems have, without zeros.
        """
        repeats = sorted(self.values.keys() & other.values.keys())
        pairs = {
            repeat: tuple(max(s.values[repeat], s.floors[repeat]) for s in (self, other))
            for repeat in repeats
        }
        return {repeat: (a, b) for repeat, (a, b) in pairs.items() if a and b}

    def against(self, other: "Spread") -> Ratio | None:
        return ratio(list(self.paired(other).values()))


class Grid:
    """All metrics of all complete runs, by system and point."""

    def __init__(self, session: Session, metrics: Sequence[Metric]) -> None:
        self._spreads: dict[tuple[str, str, float], tuple[dict[int, float], dict[int, float]]] = {}
        for one in session.measured:
            if one.run.ended is None:
                continue
            stats = summary(one.run, session.objectives)
            for metric in metrics:
                value = metric.value(one, stats)
                if value is not None:
                    key = (metric.key, one.system, one.x)
                    values, floors = self._spreads.setdefault(key, ({}, {}))
                    values[one.repeat] = value * metric.scale
                    floors[one.repeat] = (metric.floor(one, stats) or 0.0) * metric.scale
        self.xs = sorted({x for _, _, x in self._spreads})

    def spread(self, metric: Metric, system: str, x: float) -> Spread:
        return Spread(*self._spreads.get((metric.key, system, x), ({}, {})))


def shown(value: float | None) -> str:
    """Format a number for a table with three significant digits."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def shown_spread(spread: Spread) -> str:
    if spread.middle is None:
        return "–"
    if len(spread.values) == 1:
        return shown(spread.middle)
    return f"{shown(spread.middle)} ({shown(spread.low)} to {shown(spread.high)})"


def shown_ratio(one: Ratio | None) -> str:
    if one is None:
        return "–"
    if one.low is None:
        return f"{one.mean:.2f}"
    return f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f})"
