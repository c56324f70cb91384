"""The page and the summary of `baton bench compare`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.commands.command import CommandInfo, Findings
from bench.metrics import (
    GOODPUT,
    GOODPUT_FLOOR,
    Grid,
    Metric,
    percentile,
    shown,
    shown_ratio,
    shown_spread,
)
from bench.report.page import ReportPage, ReportTable
from bench.report.svg import Plot, Series
from bench.session import MeasuredRun, Session
from bench.statistics import Ratio, distribution
from bench.summary import DEFINITIONS, gaps_during
from bench.systems import ComparedSystem

DEFINED = {
    "ratio": "Disaggregated divided by colocated, in pairs: both systems of one repeat got the "
    "same prompts at the same times. The geometric mean over repeats, and in brackets where it "
    "lies with 95 % confidence (Student's t on logarithms). Better or worse is said only where "
    "the bracket leaves out 1; one in twenty such verdicts is chance all the same. "
    + GOODPUT_FLOOR,
    "ITL under long prefills": "Gaps of short requests that overlap a long prompt's prefill as a "
    "client sees it: from its sending to its first token.",
    "spread": "In brackets beside a median: the lowest and the highest repeat.",
}


@dataclass(frozen=True, slots=True)
class CompareSetting:
    colocated: ComparedSystem
    disaggregated: ComparedSystem
    rates: Sequence[float]
    capacity: float | None  # requests/s of the colocated system, where it was measured
    long_tokens: int
    objectives_given: bool


def _under_long(one: MeasuredRun, _: Mapping[str, Any]) -> float | None:
    answered = [outcome for outcome in one.run.outcomes if not outcome.error]
    short = [outcome for outcome in answered if outcome.group != "long"]
    long = [outcome for outcome in answered if outcome.group == "long"]
    p99: float | None = distribution(gaps_during(short, long))["p99"]
    return p99


UNDER_LONG = Metric("itl_p99_under_long", "ITL p99 under long prefills", _under_long)
TTFT = Metric("ttft_p50", "TTFT p50", percentile("ttft", "p50"))
TOKENS = Metric(
    "output_tokens_per_s",
    "tokens out",
    lambda _, stats: stats["output_tokens_per_s"],
    unit="tokens/s",
    scale=1.0,
    lower_is_better=False,
)
METRICS = (
    TTFT,
    Metric("ttft_p99", "TTFT p99", percentile("ttft", "p99")),
    Metric("itl_p50", "ITL p50", percentile("itl", "p50")),
    Metric("itl_p99", "ITL p99", percentile("itl", "p99")),
    UNDER_LONG,
    Metric("tpot_p50", "TPOT p50", percentile("tpot", "p50")),
    Metric("e2e_p50", "E2E p50", percentile("e2e", "p50")),
    TOKENS,
    GOODPUT,
)
HEADLINE = (UNDER_LONG, TTFT, TOKENS, GOODPUT)
_COLUMNS = ("", "colocated", "disaggregated", "ratio", "disaggregated is")


def findings(session: Session, about: CommandInfo, setting: CompareSetting) -> Findings:
    grid = Grid(session, METRICS)
    lead = [_verdict(grid, setting, rate) for rate in grid.xs] or ["No run was completed."]
    limits = ", ".join(f"{kind} {1e3 * v:.3g} ms" for kind, v in session.objectives.limits.items())
    configuration = {
        **about.configuration,
        "colocated system": setting.colocated.shape,
        "disaggregated system": setting.disaggregated.shape,
        "rates driven": list(setting.rates),
        "capacity found": setting.capacity and f"{setting.capacity:.3g} requests/s, closed loop",
        "objectives": limits
        + (
            "" if setting.objectives_given else " (3 x the p99 of one request at a time, colocated)"
        ),
    }
    page = ReportPage(
        title="Baton bench: disaggregated and colocated",
        lead=lead,
        headline=_headline(grid, setting) if grid.xs else None,
        warnings=session.warnings(),
        plots=[_plot(grid, setting, metric) for metric in METRICS if grid.xs],
        tables=[_table(grid, setting, rate) for rate in grid.xs],
        definitions={**DEFINED, **DEFINITIONS},
        configuration=configuration,
        machine=about.machine,
        made=about.made,
    )
    rows = [_row(grid, setting, rate) for rate in grid.xs]
    summary = {
        "rows": rows,
        "objectives": dict(session.objectives.limits),
        "capacity_requests_per_s": setting.capacity and round(setting.capacity, 3),
    }
    return Findings(page, summary)


def _verdict(grid: Grid, setting: CompareSetting, rate: float) -> str:
    by: dict[str, list[str]] = {"better": [], "worse": [], "undecided": []}
    for metric in HEADLINE:
        if (one := _ratio(grid, setting, metric, rate)) is not None:
            by[metric.word(one.verdict)].append(metric.name)
    told = "; ".join(f"{word} by {', '.join(names)}" for word, names in by.items() if names)
    if not told:
        return f"At {rate:g} requests/s not both systems have been measured."
    return f"At {rate:g} requests/s disaggregated is {told}."


def _headline(grid: Grid, setting: CompareSetting) -> ReportTable:
    rows = []
    for rate in grid.xs:
        for metric in HEADLINE:
            ours = grid.spread(metric, setting.disaggregated.name, rate)
            theirs = grid.spread(metric, setting.colocated.name, rate)
            one = _ratio(grid, setting, metric, rate)
            rows.append(
                (
                    f"{rate:g} requests/s: {metric.name}, {metric.unit}",
                    shown(theirs.middle),
                    shown(ours.middle),
                    shown_ratio(one),
                    metric.word(one.verdict) if one else "–",
                )
            )
    return ReportTable("In short", _COLUMNS, rows, emphasis=_decided(rows))


def _ratio(grid: Grid, setting: CompareSetting, metric: Metric, rate: float) -> Ratio | None:
    """Return the ratio of disaggregated to colocated."""
    ours = grid.spread(metric, setting.disaggregated.name, rate)
    return ours.against(grid.spread(metric, setting.colocated.name, rate))


def _decided(rows: Sequence[Sequence[str]]) -> frozenset[int]:
    return frozenset(i for i, row in enumerate(rows) if row[-1] in ("better", "worse"))


def _table(grid: Grid, setting: CompareSetting, rate: float) -> ReportTable:
    rows = []
    for metric in METRICS:
        ours = grid.spread(metric, setting.disaggregated.name, rate)
        theirs = grid.spread(metric, setting.colocated.name, rate)
        one = ours.against(theirs)
        rows.append(
            (
                f"{metric.name}, {metric.unit}",
                shown_spread(theirs),
                shown_spread(ours),
                shown_ratio(one),
                metric.word(one.verdict) if one else "–",
            )
        )
    return ReportTable(f"{rate:g} requests/s", _COLUMNS, rows, emphasis=_decided(rows))


def _plot(grid: Grid, setting: CompareSetting, metric: Metric) -> Plot:
    series = []
    for colour, arm in enumerate((setting.colocated, setting.disaggregated)):
        spreads = [grid.spread(metric, arm.name, rate) for rate in grid.xs]
        middles = [s.middle if s.middle is not None else float("nan") for s in spreads]
        lows, highs = [s.low for s in spreads], [s.high for s in spreads]
        name = f"{arm.name} ({arm.shape})"
        series.append(Series(name, grid.xs, middles, lows, highs, colour=colour))
    better = "lower is better" if metric.lower_is_better else "higher is better"
    note = f"Median of the repeats, with their range; {better}."
    label = f"{metric.name}, {metric.unit}"
    return Plot(metric.name, "offered requests/s", label, series, note=note)


def _row(grid: Grid, setting: CompareSetting, rate: float) -> dict[str, Any]:
    row: dict[str, Any] = {"rate": rate}
    for metric in METRICS:
        ours = grid.spread(metric, setting.disaggregated.name, rate)
        theirs = grid.spread(metric, setting.colocated.name, rate)
        one = ours.against(theirs)
        row[metric.key] = {
            "unit": metric.unit,
            "colocated": theirs.middle,
            "disaggregated": ours.middle,
            "ratio": one.record() if one else None,
            "disaggregated_is": metric.word(one.verdict) if one else None,
        }
    return row
