"""Comparison of systems: metrics, ratios over paired repeats, tables and plots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.report.page import ReportTable
from bench.report.svg import Plot, Series
from bench.session import MeasuredRun, Session
from bench.statistics import Ratio, ratio
from bench.summary import summary
from bench.systems import ComparedSystem

Value = Callable[[MeasuredRun, Mapping[str, Any]], float | None]  # of a run and its summary
MISSING = "–"


@dataclass(frozen=True, slots=True)
class Metric:
    key: str
    name: str
    value: Value
    unit: str = "ms"
    scale: float = 1e3  # factor from the result of `value` to `unit`
    lower_is_better: bool = True
    # Minimum value in ratios, because values of 0 would be left out.
    floor: Value = lambda one, stats: 0.0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}"

    def verdict(self, one: Ratio) -> str:
        """Return "better", "worse" or "undecided"."""
        if one.verdict == "undecided":
            return one.verdict
        return "better" if (one.verdict == "lower") == self.lower_is_better else "worse"


def percentile(of: str, which: str) -> Value:
    """Return a function that reads one percentile of one distribution from a summary."""
    return lambda _, stats: stats[of][which]


GOODPUT = Metric(
    "goodput",
    "goodput",
    lambda _, stats: stats["goodput"]["requests_per_s"] if stats["goodput"] else None,
    unit="requests/s",
    scale=1.0,
    lower_is_better=False,
    floor=lambda one, _: 0.5 / max(one.run.wall_s, 1e-9),  # half a request in the whole run
)
DEFINITIONS = {
    "ratio": "The geometric mean over paired repeats, with its 95 % confidence interval (Student's "
    "t on logarithms). In a pair, both systems got the same prompts at the same times. Better and "
    "worse appear only if the interval excludes 1. One in twenty such verdicts is chance. In a "
    "ratio of goodputs, a run without one good request counts as half a request.",
    "spread": "In brackets beside a median: the lowest and the highest repeat.",
}


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
        """Return the pairs of values for a ratio, by repeat.

        Only repeats that both systems have, without zeros.
        """
        pairs = {}
        for repeat in sorted(self.values.keys() & other.values.keys()):
            a, b = (max(one.values[repeat], one.floors[repeat]) for one in (self, other))
            if a and b:
                pairs[repeat] = (a, b)
        return pairs

    def against(self, other: "Spread") -> Ratio | None:
        return ratio(list(self.paired(other).values()))

    def __str__(self) -> str:
        if len(self.values) < 2:
            return shown(self.middle)
        return f"{shown(self.middle)} ({shown(self.low)} to {shown(self.high)})"


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


Pair = tuple[ComparedSystem, ComparedSystem]  # a system, and the system to divide by


@dataclass(frozen=True, slots=True)
class Comparison:
    """A grid as both reports show it: `systems` at `xs`, and the ratios of `pairs`."""

    grid: Grid
    systems: Sequence[ComparedSystem]
    pairs: Sequence[Pair]
    xs: Sequence[float]
    x_label: str
    log_x: bool = False

    def ratio(self, metric: Metric, pair: Pair, x: float) -> Ratio | None:
        ours, theirs = (self.grid.spread(metric, system.name, x) for system in pair)
        return ours.against(theirs)

    def has(self, metric: Metric) -> bool:
        return any(
            self.grid.spread(metric, s.name, x).values for s in self.systems for x in self.xs
        )

    def table(self, metric: Metric, xs: Sequence[float]) -> ReportTable:
        """Return a table with the systems' spreads and the pairs' ratios in one row for each x."""
        rows: list[tuple[str, ...]] = []
        decided: set[int] = set()
        for x in xs:
            spreads = [self.grid.spread(metric, system.name, x) for system in self.systems]
            if any(spread.values for spread in spreads):
                ratios = [self.ratio(metric, pair, x) for pair in self.pairs]
                if ratios[0] and metric.verdict(ratios[0]) != "undecided":
                    decided.add(len(rows))
                at = f"{x:g}" if x else "none"
                rows.append((at, *map(str, spreads), *(shown_ratio(one) for one in ratios)))
        names = [system.name for system in self.systems]
        over = [f"{ours.name} / {theirs.name}" for ours, theirs in self.pairs]
        return ReportTable(
            metric.label, (self.x_label, *names, *over), rows, emphasis=frozenset(decided)
        )

    def plot(self, metric: Metric) -> Plot:
        series = []
        for colour, system in enumerate(self.systems):
            spreads = [self.grid.spread(metric, system.name, x) for x in self.xs]
            middles = [number_or_nan(spread.middle) for spread in spreads]
            low, high = [s.low for s in spreads], [s.high for s in spreads]
            name = f"{system.name} ({system.shape})"
            series.append(Series(name, self.xs, middles, low, high, colour))
        better = "lower is better" if metric.lower_is_better else "higher is better"
        note = f"Median of the repeats, with their range; {better}."
        log_y = self.log_x and metric.lower_is_better
        return Plot(metric.name, self.x_label, metric.label, series, self.log_x, log_y, note=note)

    def ratio_plot(self, metric: Metric, pair: Pair, mark: float | None) -> Plot:
        name = f"{pair[0].name} / {pair[1].name}"
        ratios = [self.ratio(metric, pair, x) for x in self.xs]
        means = [number_or_nan(one.mean if one else None) for one in ratios]
        low = [one.low if one else None for one in ratios]
        high = [one.high if one else None for one in ratios]
        better = "below" if metric.lower_is_better else "above"
        return Plot(
            f"{metric.name}: {name}",
            self.x_label,
            "ratio",
            [Series(name, self.xs, means, low, high, colour=3)],
            log_x=True,
            log_y=True,
            level=1.0,
            mark=mark,
            note=f"{pair[0].name} is better {better} the line at 1. Bars are 95 % confidence. "
            "The vertical line is the break-even.",
        )

    def row(self, metric: Metric, x: float) -> dict[str, Any]:
        """Return the JSON record of one metric at one x."""
        row: dict[str, Any] = {"unit": metric.unit}
        for system in self.systems:
            row[system.name] = self.grid.spread(metric, system.name, x).middle
        for pair in self.pairs:
            one = self.ratio(metric, pair, x)
            row[f"to_{pair[1].name}"] = one and {**one.record(), "verdict": metric.verdict(one)}
        return row


def number_or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def shown(value: float | None) -> str:
    """Format a number for a table with three significant digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def shown_ratio(one: Ratio | None) -> str:
    if one is None:
        return MISSING
    if one.low is None:
        return f"{one.mean:.2f}"
    return f"{one.mean:.2f} ({one.low:.2f} to {one.high:.2f})"
