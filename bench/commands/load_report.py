"""The page and the summary of `baton bench load`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.commands.command import Findings
from bench.comparison import MISSING, number_or_nan, shown
from bench.report.page import ReportPage, ReportTable
from bench.report.svg import Plot, Series
from bench.session import MeasuredRun, Session
from bench.summary import DEFINITIONS, summary

_ECDF_POINTS = 120
_SUMMARY_KEYS = (
    *("requests", "completed", "errors", "requests_per_s", "input_tokens_per_s"),
    *("output_tokens_per_s", "ttft", "itl", "tpot", "e2e", "late", "goodput", "client_cpu"),
)
Stats = dict[str, Any]
Runs = Sequence[tuple[MeasuredRun, Stats]]


def findings(session: Session, *, open_loop: bool) -> Findings:
    """Return the report of a session.

    Args:
        open_loop: the load was given as rates, not as streams.
    """
    runs = [(one, summary(one.run, session.objectives)) for one in session.measured]
    page = ReportPage(
        title="Baton bench: load",
        lead=[_verdict(runs)],
        headline=_table("In short", _HEADLINE, runs) if runs else None,
        plots=[*_curves(runs, open_loop), *_distributions(runs)],
        tables=[_table("Throughput", _THROUGHPUT, runs), *_latency_tables(runs)],
        definitions=DEFINITIONS,
    )
    rows = [
        {"point": one.point, "x": one.x, **{key: stats[key] for key in _SUMMARY_KEYS}}
        for one, stats in runs
    ]
    return Findings(page, {"runs": rows})


def _verdict(runs: Runs) -> str:
    if not runs:
        return "No run was completed."
    completed = sum(stats["completed"] for _, stats in runs)
    requests = sum(stats["requests"] for _, stats in runs)
    best, most = max(runs, key=lambda run: run[1]["output_tokens_per_s"] or 0.0)
    at = f" at most, at {best.point}" if len(runs) > 1 else ""
    rate = f"{shown(most['output_tokens_per_s'])} tokens/s out{at}"
    return f"{completed} of {requests} requests completed; {rate}."


Columns = dict[str, Callable[[Stats], str]]


def _ms(key: str, which: str, unit: str = "") -> Callable[[Stats], str]:
    def cell(stats: Stats) -> str:
        seconds = stats[key][which]
        return MISSING if seconds is None else f"{shown(seconds * 1e3)}{unit}"

    return cell


def _goodput(stats: Stats) -> str:
    good = stats["goodput"]
    return f"{good['requests_per_s']:.3g} ({good['share'] or 0:.0%})" if good else MISSING


_HEADLINE: Columns = {
    "completed": lambda stats: f"{stats['completed']} of {stats['requests']}",
    "tokens/s out": lambda stats: shown(stats["output_tokens_per_s"]),
    **{
        f"{key.upper()} {which}": _ms(key, which, " ms")
        for key in ("ttft", "itl")
        for which in ("p50", "p99")
    },
    "goodput/s": _goodput,
}
_THROUGHPUT: Columns = {
    "requests": lambda stats: str(stats["requests"]),
    "completed": lambda stats: str(stats["completed"]),
    "errors": lambda stats: (
        ", ".join(f"{n} x {kind}" for kind, n in stats["errors"].items()) or "0"
    ),
    "late": lambda stats: str(stats["late"]),
    "seconds": lambda stats: shown(stats["wall_s"]),
    "requests/s": lambda stats: shown(stats["requests_per_s"]),
    "tokens/s in": lambda stats: shown(stats["input_tokens_per_s"]),
    "tokens/s out": lambda stats: shown(stats["output_tokens_per_s"]),
    "goodput/s": _goodput,
    "tokens per chunk": lambda stats: shown(stats["tokens_per_chunk"]),
    "client CPU": lambda stats: f"{stats['client_cpu']:.0%}",
}


def _table(title: str, columns: Columns, runs: Runs) -> ReportTable:
    rows = [(one.point, *(cell(stats) for cell in columns.values())) for one, stats in runs]
    return ReportTable(title, ("load", *columns), rows)


def _latency_tables(runs: Runs) -> list[ReportTable]:
    def columns(key: str) -> Columns:
        times = {which: _ms(key, which) for which in ("mean", "p50", "p90", "p99", "max")}
        return {"n": lambda stats: str(stats[key]["n"]), **times}

    return [
        _table(f"{key.upper()}, ms", columns(key), runs) for key in ("ttft", "itl", "tpot", "e2e")
    ]


def _curves(runs: Runs, open_loop: bool) -> list[Plot]:
    """Plot latency over throughput, if there is more than one load."""
    if len(runs) < 2:
        return []
    offered = [one.x for one, _ in runs]
    load = "offered requests/s" if open_loop else "streams"
    rates = [stats["requests_per_s"] for _, stats in runs]

    def latency(key: str) -> Plot:
        name = key.upper()
        series = [
            Series(which, rates, [_value_ms(stats[key][which]) for _, stats in runs], colour=i)
            for i, which in enumerate(("p50", "p90", "p99"))
        ]
        title = f"{name} over throughput"
        return Plot(title, "completed requests/s", f"{name}, ms", series, log_y=True)

    completed = [Series("completed", offered, rates)]
    if all(stats["goodput"] for _, stats in runs):
        good = [stats["goodput"]["requests_per_s"] for _, stats in runs]
        completed.append(Series("goodput", offered, good, colour=1))
    out = [stats["output_tokens_per_s"] for _, stats in runs]
    return [
        latency("ttft"),
        latency("itl"),
        Plot("Completed requests", load, "requests/s", completed),
        Plot("Tokens out", load, "tokens/s", [Series("tokens/s", offered, out)]),
    ]


def _distributions(runs: Runs) -> list[Plot]:
    def cumulative(name: str, times: Callable[[MeasuredRun], Sequence[float]]) -> Plot:
        series = []
        for number, (one, _) in enumerate(runs):
            values = np.sort(np.fromiter(times(one), float)) * 1e3
            if len(values):
                at = np.unique(np.linspace(0, len(values) - 1, _ECDF_POINTS).round().astype(int))
                xs, share = values[at].tolist(), ((at + 1) / len(values)).tolist()
                series.append(Series(one.point, xs, share, colour=number, marks=False))
        return Plot(f"Distribution of {name}", f"{name}, ms", "share of all", series, log_x=True)

    def first(one: MeasuredRun) -> list[float]:
        return [o.ttft for o in one.run.outcomes if o.ttft is not None and not o.error]

    def gaps(one: MeasuredRun) -> list[float]:
        return [gap for o in one.run.outcomes if not o.error for gap in o.gaps]

    return [cumulative("TTFT", first), cumulative("ITL", gaps), _over_time(runs)]


def _over_time(runs: Runs) -> Plot:
    """Plot TTFT over the time of a run, which shows a growing queue."""
    series = []
    for number, (one, _) in enumerate(runs):
        points = sorted((o.due, o.ttft * 1e3) for o in one.run.outcomes if o.ttft is not None)
        xs, ys = [due for due, _ in points], [ttft for _, ttft in points]
        series.append(Series(one.point, xs, ys, colour=number, marks=len(points) < 300))
    note = "A line that keeps rising is a growing queue: the server cannot sustain this rate."
    return Plot("TTFT through the run", "due, s from the start", "TTFT, ms", series, note=note)


def _value_ms(seconds: float | None) -> float:
    return number_or_nan(seconds) * 1e3
