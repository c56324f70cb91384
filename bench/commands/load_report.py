"""The page and the summary of `baton bench load`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.commands.command import CommandInfo, Findings
from bench.metrics import shown
from bench.report.page import ReportPage, ReportTable
from bench.report.svg import Plot, Series
from bench.session import MeasuredRun, Session
from bench.summary import DEFINITIONS, summary

_ECDF_POINTS = 120
_SUMMARY_KEYS = (
    "requests",
    "answered",
    "errors",
    "requests_per_s",
    "input_tokens_per_s",
    "output_tokens_per_s",
    "ttft",
    "itl",
    "tpot",
    "e2e",
    "late",
    "goodput",
    "client_cpu",
)
Stats = dict[str, Any]


def findings(session: Session, about: CommandInfo, *, open_loop: bool) -> Findings:
    """Return the report of a session.

    Args:
        open_loop: the load was given as rates, not as streams.
    """
    runs = [(one, summary(one.run, session.objectives)) for one in session.measured]
    page = ReportPage(
        title="Baton bench: load",
        lead=[_verdict(runs)],
        headline=_headline(runs) if runs else None,
        warnings=session.warnings(),
        plots=[*_curves(runs, open_loop), *_distributions(runs)],
        tables=[_overview(runs), *_latency_tables(runs)],
        definitions=DEFINITIONS,
        configuration=about.configuration,
        machine=about.machine,
        made=about.made,
    )
    rows = [
        {"point": one.point, "x": one.x, **{key: stats[key] for key in _SUMMARY_KEYS}}
        for one, stats in runs
    ]
    return Findings(page, {"runs": rows})


def _verdict(runs: Sequence[tuple[MeasuredRun, Stats]]) -> str:
    if not runs:
        return "Nothing was measured."
    answered = sum(stats["answered"] for _, stats in runs)
    requests = sum(stats["requests"] for _, stats in runs)
    best, most = max(runs, key=lambda run: run[1]["output_tokens_per_s"] or 0.0)
    at = f", at {best.point}" if len(runs) > 1 else ""
    said = f"{answered} of {requests} requests answered; "
    return f"{said}{shown(most['output_tokens_per_s'])} tokens/s out{' at most' if at else ''}{at}."


def _headline(runs: Sequence[tuple[MeasuredRun, Stats]]) -> ReportTable:
    columns = (
        *("load", "answered", "tokens/s out"),
        *("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "goodput/s"),
    )
    rows = [
        (
            one.point,
            f"{stats['answered']} of {stats['requests']}",
            shown(stats["output_tokens_per_s"]),
            *(_ms(stats[key][which]) for key in ("ttft", "itl") for which in ("p50", "p99")),
            _goodput(stats),
        )
        for one, stats in runs
    ]
    return ReportTable("In short", columns, rows)


def _goodput(stats: Stats) -> str:
    good = stats["goodput"]
    return f"{good['requests_per_s']:.3g} ({good['share'] or 0:.0%})" if good else "–"


def _overview(runs: Sequence[tuple[MeasuredRun, Stats]]) -> ReportTable:
    rows = []
    for one, stats in runs:
        rows.append(
            (
                one.point,
                str(stats["requests"]),
                str(stats["answered"]),
                ", ".join(f"{n} x {kind}" for kind, n in stats["errors"].items()) or "0",
                str(stats["late"]),
                shown(stats["wall_s"]),
                shown(stats["requests_per_s"]),
                shown(stats["input_tokens_per_s"]),
                shown(stats["output_tokens_per_s"]),
                _goodput(stats),
                shown(stats["tokens_per_chunk"]),
                f"{stats['client_cpu']:.0%}",
            )
        )
    columns = (
        "load",
        "requests",
        "answered",
        "errors",
        "late",
        "seconds",
        "requests/s",
        "tokens/s in",
        "tokens/s out",
        "goodput/s",
        "tokens per chunk",
        "client CPU",
    )
    return ReportTable("Throughput", columns, rows)


def _latency_tables(runs: Sequence[tuple[MeasuredRun, Stats]]) -> list[ReportTable]:
    names = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
    columns = ("load", "n", "mean", "p50", "p90", "p99", "max")
    return [
        ReportTable(
            f"{name}, ms",
            columns,
            [
                (
                    one.point,
                    str(stats[key]["n"]),
                    *(_number_ms(stats[key][column]) for column in columns[2:]),
                )
                for one, stats in runs
            ],
        )
        for key, name in names.items()
    ]


def _curves(runs: Sequence[tuple[MeasuredRun, Stats]], open_loop: bool) -> list[Plot]:
    """Plot latency over throughput, if there is more than one load."""
    if len(runs) < 2:
        return []
    done = [stats["requests_per_s"] for _, stats in runs]
    asked = "offered requests/s" if open_loop else "streams"
    offered = [one.x for one, _ in runs]
    plots = [
        Plot(
            f"{name} over throughput",
            "answered requests/s",
            f"{name}, ms",
            [
                Series(which, done, [_ms_value(stats[key][which]) for _, stats in runs], colour=i)
                for i, which in enumerate(("p50", "p90", "p99"))
            ],
            log_y=True,
        )
        for key, name in (("ttft", "TTFT"), ("itl", "ITL"))
    ]
    answered = [Series("answered", offered, done)]
    if all(stats["goodput"] for _, stats in runs):
        good = [stats["goodput"]["requests_per_s"] for _, stats in runs]
        answered.append(Series("goodput", offered, good, colour=1))
    out = [stats["output_tokens_per_s"] for _, stats in runs]
    return [
        *plots,
        Plot("Requests answered", asked, "requests/s", answered),
        Plot("Tokens out", asked, "tokens/s", [Series("tokens/s", offered, out)]),
    ]


def _distributions(runs: Sequence[tuple[MeasuredRun, Stats]]) -> list[Plot]:
    def times(pick: Callable[[MeasuredRun], Sequence[float]], title: str, label: str) -> Plot:
        series = []
        for number, (one, _) in enumerate(runs):
            values = np.sort(np.fromiter(pick(one), float)) * 1e3
            if len(values):
                at = np.unique(np.linspace(0, len(values) - 1, _ECDF_POINTS).round().astype(int))
                xs, share = values[at].tolist(), ((at + 1) / len(values)).tolist()
                series.append(Series(one.point, xs, share, colour=number, marks=False))
        return Plot(title, label, "share of all", series, log_x=True)

    return [
        times(
            lambda one: [o.ttft for o in one.run.outcomes if o.ttft is not None and not o.error],
            "Distribution of TTFT",
            "TTFT, ms",
        ),
        times(
            lambda one: [gap for o in one.run.outcomes if not o.error for gap in o.gaps],
            "Distribution of ITL",
            "ITL, ms",
        ),
        _over_time(runs),
    ]


def _over_time(runs: Sequence[tuple[MeasuredRun, Stats]]) -> Plot:
    """Plot TTFT over the time of a run, which shows a growing queue."""
    series = []
    for number, (one, _) in enumerate(runs):
        points = sorted((o.due, o.ttft * 1e3) for o in one.run.outcomes if o.ttft is not None)
        xs, ys = [due for due, _ in points], [ttft for _, ttft in points]
        series.append(Series(one.point, xs, ys, colour=number, marks=len(points) < 300))
    return Plot(
        "TTFT through the run",
        "due, s from the start",
        "TTFT, ms",
        series,
        note="A line that keeps rising is a queue that keeps growing: this rate cannot be served.",
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{shown(seconds * 1e3)} ms"


def _number_ms(seconds: float | None) -> str:
    return "–" if seconds is None else shown(seconds * 1e3)


def _ms_value(seconds: float | None) -> float:
    return float("nan") if seconds is None else seconds * 1e3
