"""The page and the summary of `baton bench break-even`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import comparison, summary
from bench.commands.command import Findings
from bench.comparison import GOODPUT, Comparison, Grid, Metric, Pair, Value, shown, shown_ratio
from bench.report.page import ReportPage, ReportTable
from bench.session import MeasuredRun, Session
from bench.statistics import Confidence, Crossing, confidence, crossing, distribution
from bench.systems import ComparedSystem
from bench.traffic.load import RequestOutcome

FLAG = "--local-prefill-max-tokens"
LOCAL = "local"
DEFINITIONS = {
    "probe": "A prompt of the length in question, with a short response. Probes are a Poisson "
    "stream, the same one for every system, while other streams generate.",
    "disaggregation pays": "At this length and at every longer measured one, the criterion is "
    "better on the disaggregated system than on the colocated one, by the geometric mean over "
    "repeats. Between two measured lengths the result is interpolated on logarithmic scales.",
    "criterion": "Goodput of all requests if objectives were given, otherwise the median TTFT of "
    "probes. The result by the ITL of the other streams is beside it.",
    "confidence": "The repeats are redrawn 2000 times with replacement: how often the result stays "
    "the same, and between which lengths 90 % of the results lie. Fewer than three repeats give no "
    "confidence.",
    LOCAL: "The disaggregated system with local_prefill_max_tokens above any length: its decode "
    "nodes prefill every prompt. The recommended local_prefill_max_tokens is the longest measured "
    "length at which a hand-off is not better yet. By TTFT and by the ITL of the others it can "
    "differ.",
    "ITL of the others under probes": "Gaps of the other streams that overlap a probe's prefill "
    "as its client sees it: from its sending to its first token.",
    **comparison.DEFINITIONS,
    **summary.DEFINITIONS,
}


def _of(one: MeasuredRun, group: str) -> list[RequestOutcome]:
    return [o for o in one.run.outcomes if o.group == group and not o.error]


def _ttft(which: str) -> Value:
    return lambda one, _: distribution(o.ttft for o in _of(one, "probe") if o.ttft)[which]


def _itl(one: MeasuredRun, _: Mapping[str, Any]) -> float | None:
    """Return the p99 ITL during the probes' prefills, or of the whole run without probes."""
    others, probes = _of(one, "background"), _of(one, "probe")
    gaps = summary.gaps_during(others, probes) if one.x else [g for o in others for g in o.gaps]
    p99: float | None = distribution(gaps)["p99"]
    return p99


def _undisturbed(one: MeasuredRun, _: Mapping[str, Any]) -> float | None:
    if one.x:
        return None
    p50: float | None = distribution(g for o in _of(one, "background") for g in o.gaps)["p50"]
    return p50


TTFT = Metric("probe_ttft_p50", "TTFT p50 of probes", _ttft("p50"))
TTFT_P90 = Metric("probe_ttft_p90", "TTFT p90 of probes", _ttft("p90"))
ITL = Metric("others_itl_p99", "ITL p99 of the others under probes", _itl)
UNDISTURBED = Metric("others_itl_p50", "ITL p50 without probes", _undisturbed)
METRICS = (TTFT, TTFT_P90, ITL, GOODPUT)


@dataclass(frozen=True, slots=True)
class BreakEvenResult:
    """The break-even point of a pair of systems by one metric."""

    metric: Metric
    pair: Pair
    lengths: Sequence[float]
    found: Crossing
    sure: Confidence | None

    @classmethod
    def of(
        cls, grid: Grid, metric: Metric, lengths: Sequence[int], pair: Pair
    ) -> "BreakEvenResult":
        """Find the length from which the first system of the pair is better.

        Only lengths and repeats that both systems have are used.
        """
        sign = 1.0 if metric.lower_is_better else -1.0
        logs: dict[float, dict[int, float]] = {}
        for length in lengths:
            ours, theirs = (grid.spread(metric, system.name, length) for system in pair)
            if pairs := ours.paired(theirs):
                logs[float(length)] = {r: sign * math.log(a / b) for r, (a, b) in pairs.items()}
        measured = sorted(logs)
        repeats = set.intersection(*(set(found) for found in logs.values())) if logs else set()
        table = np.array([[logs[length][r] for length in measured] for r in sorted(repeats)])
        if not len(table):
            return cls(metric, pair, (), Crossing(None, None, None), None)
        found = crossing(measured, table.mean(axis=0).tolist())
        return cls(metric, pair, measured, found, confidence(measured, table))

    def sentence(self) -> str:
        if not self.lengths:
            return "not measured"
        shortest, longest = self.lengths[0], self.lengths[-1]
        if self.found.at is None:
            text = f"never in the range of {shortest:g} to {longest:g} tokens"
        elif self.found.everywhere:
            text = f"from the shortest measured length of {shortest:g} tokens"
        else:
            text = (
                f"from about {shown(self.found.at)} tokens (not yet at {self.found.below:g}, "
                f"from {self.found.first:g} everywhere)"
            )
        if self.sure is None:
            return f"{text}; too few repeats for a confidence"
        text += f"; the same in {self.sure.same:.0%} of redrawn repeats"
        if self.found.at is not None and self.sure.low is not None and self.sure.high is not None:
            text += f", 90 % between {shown(self.sure.low)} and {shown(self.sure.high)} tokens"
        return text

    def record(self) -> dict[str, Any]:
        return {
            "by": self.metric.key,
            "against": self.pair[1].name,
            "tokens": None if self.found.at is None else round(self.found.at),
            "not_yet_at": self.found.below,
            "everywhere_from": self.found.first,
            "same_share": self.sure and self.sure.same,
            "low": self.sure and self.sure.low,
            "high": self.sure and self.sure.high,
        }

    def advice(self) -> int | None:
        """Return the recommended local_prefill_max_tokens, or None if too little was measured.

        It is the longest measured length for which remote prefill is not better yet.
        """
        return int(self.found.below or 0) if self.lengths else None


def findings(
    session: Session,
    systems: tuple[ComparedSystem, ComparedSystem, ComparedSystem],
    *,
    lengths: Sequence[int],
    rates: Mapping[int, float],
    shared_cores: int | None = None,
) -> Findings:
    """Return the report of a session.

    Args:
        systems: the colocated one, the disaggregated one with every prompt handed off, and the
            same nodes with no prompt handed off.
        rates: probes per second by their length.
        shared_cores: cores of all nodes. None: they have CUDA devices.
    """
    colocated, remote, without_handoff = systems
    grid = Grid(session, (*METRICS, UNDISTURBED))
    pairs = [(remote, colocated), (remote, without_handoff)]
    xs = [float(length) for length in lengths]
    view = Comparison(grid, systems, pairs, xs, "prompt tokens", log_x=True)
    criterion = GOODPUT if session.objectives.limits else TTFT
    by = [criterion, *(metric for metric in (TTFT, ITL) if metric is not criterion)]
    pays, local = (
        [BreakEvenResult.of(grid, metric, lengths, pair) for metric in by] for pair in pairs
    )
    lead = f"Disaggregation pays, by {criterion.name}: {pays[0].sentence()}."
    measured = [metric for metric in METRICS if view.has(metric)]
    page = ReportPage(
        title="Baton bench: from which prompt length disaggregation pays",
        lead=[lead, *_shared_cores(view, shared_cores), _advice(local)],
        headline=_headline(pays, local),
        plots=[
            *(view.plot(metric) for metric in measured),
            *(view.ratio_plot(r.metric, r.pair, r.found.at) for r in [*pays, *local] if view.xs),
        ],
        tables=[view.table(metric, (0, *lengths)) for metric in measured],
        definitions=DEFINITIONS,
        configuration={
            "colocated system": colocated.shape,
            "disaggregated system": remote.shape,
            "probes a second": {str(length): rate for length, rate in rates.items()},
        },
    )
    record = {
        "criterion": criterion.key,
        "break_even": pays[0].record(),
        "others": [one.record() for one in pays[1:]],
        "shared_cores": shared_cores,
        "local_prefill_max_tokens": {
            "advice": local[0].advice(),
            "advice_by": {one.metric.key: one.advice() for one in local},
            "answers": [one.record() for one in local],
        },
        "rows": [
            {"prompt_tokens": length, **{m.key: view.row(m, length) for m in METRICS}}
            for length in lengths
        ],
    }
    return Findings(page, record)


def _advice(local: Sequence[BreakEvenResult]) -> str:
    """Return the recommendation by each metric, as a sentence."""
    texts = []
    for one in local:
        value = one.advice()
        if value is not None:
            text = f"{FLAG}={value}" if one.found.at is not None else f"{FLAG} of at least {value}"
            texts.append(f"{text} if {one.metric.name} matters")
    return f"Advice for decode nodes: {'; '.join(texts) or 'none, too little was measured'}."


def _shared_cores(view: Comparison, cores: int | None) -> list[str]:
    """Return the warning that prefill and decode nodes share the same cores."""
    if cores is None:
        return []
    cost = view.ratio(UNDISTURBED, view.pairs[0], 0)
    gap = f"Without probes, the ITL is {shown_ratio(cost)} times that of the colocated system. "
    return [
        f"Prefill and decode share the {cores} cores of this machine: a prompt takes cores from "
        "running responses, and every engine is one more process. "
        f"{gap if cost else ''}This result does not apply to nodes with their own cores or devices."
        " On this machine alone, `baton up --prefill 0` is one engine with all cores."
    ]


def _headline(pays: Sequence[BreakEvenResult], local: Sequence[BreakEvenResult]) -> ReportTable:
    rows = [
        (question, one.metric.name, one.sentence())
        for question, found in (
            ("disaggregation pays", pays),
            ("a hand-off is better than prefill on the decode node", local),
        )
        for one in found
    ]
    return ReportTable("In short", ("", "by", "from which prompt length"), rows)
