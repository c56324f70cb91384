"""The page and the summary of `baton bench compare`."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench import comparison, summary
from bench.commands.command import Findings
from bench.comparison import GOODPUT, MISSING, Comparison, Grid, Metric, percentile, shown
from bench.report.page import ReportPage, ReportTable
from bench.session import MeasuredRun, Session
from bench.statistics import distribution
from bench.systems import ComparedSystem

DEFINITIONS = {
    "ITL under long prefills": "Gaps of short requests that overlap a long prompt's prefill as a "
    "client sees it: from its sending to its first token.",
    **comparison.DEFINITIONS,
    **summary.DEFINITIONS,
}


def _under_long(one: MeasuredRun, _: Mapping[str, Any]) -> float | None:
    completed = [outcome for outcome in one.run.outcomes if not outcome.error]
    short = [outcome for outcome in completed if outcome.group != "long"]
    long = [outcome for outcome in completed if outcome.group == "long"]
    p99: float | None = distribution(summary.gaps_during(short, long))["p99"]
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


def findings(
    session: Session,
    systems: tuple[ComparedSystem, ComparedSystem],
    *,
    rates: Sequence[float],
    capacity: float | None,
    objectives_given: bool,
) -> Findings:
    """Return the report of a session.

    Args:
        systems: the colocated and the disaggregated one.
        capacity: requests/s of the colocated system, if measured.
    """
    grid = Grid(session, METRICS)
    view = Comparison(grid, systems, [systems[::-1]], grid.xs, "offered requests/s")
    limits = ", ".join(f"{kind} {1e3 * v:.3g} ms" for kind, v in session.objectives.limits.items())
    derived = " (3 x the p99 of one request at a time, colocated)"
    measured = [metric for metric in METRICS if view.has(metric)]
    page = ReportPage(
        title="Baton bench: colocated or disaggregated",
        lead=[_verdict(view, rate) for rate in grid.xs] or ["No run was completed."],
        headline=_headline(view) if grid.xs else None,
        plots=[view.plot(metric) for metric in measured],
        tables=[view.table(metric, grid.xs) for metric in measured],
        definitions=DEFINITIONS,
        configuration={
            **{f"{system.name} system": system.shape for system in systems},
            "rates": list(rates),
            "capacity": capacity and f"{capacity:.3g} requests/s, closed loop",
            "objectives": limits + ("" if objectives_given else derived),
        },
    )
    record = {
        "rows": [
            {"rate": rate, **{metric.key: view.row(metric, rate) for metric in METRICS}}
            for rate in grid.xs
        ],
        "objectives": dict(session.objectives.limits),
        "capacity_requests_per_s": capacity and round(capacity, 3),
    }
    return Findings(page, record)


def _verdict(view: Comparison, rate: float) -> str:
    found: dict[str, list[str]] = {"better": [], "worse": [], "undecided": []}
    for metric in HEADLINE:
        if (one := view.ratio(metric, view.pairs[0], rate)) is not None:
            found[metric.verdict(one)].append(metric.name)
    verdicts = "; ".join(f"{word} by {', '.join(names)}" for word, names in found.items() if names)
    if not verdicts:
        return f"At {rate:g} requests/s only one of the systems was measured."
    return f"At {rate:g} requests/s disaggregated is {verdicts}."


def _headline(view: Comparison) -> ReportTable:
    rows = []
    for rate in view.xs:
        for metric in HEADLINE:
            spreads = [view.grid.spread(metric, system.name, rate) for system in view.systems]
            one = view.ratio(metric, view.pairs[0], rate)
            cells = (*(shown(each.middle) for each in spreads), comparison.shown_ratio(one))
            verdict = metric.verdict(one) if one else MISSING
            rows.append((f"{rate:g} requests/s: {metric.label}", *cells, verdict))
    decided = frozenset(i for i, row in enumerate(rows) if row[-1] in ("better", "worse"))
    columns = ("", "colocated", "disaggregated", "ratio", "disaggregated is")
    return ReportTable("In short", columns, rows, emphasis=decided)
