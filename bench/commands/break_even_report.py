"""The page and the summary of `baton bench break-even`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.commands.break_even_answer import BreakEvenResult, advice, advised, answer
from bench.commands.command import CommandInfo, Findings
from bench.metrics import GOODPUT, GOODPUT_FLOOR, Grid, Metric, shown_ratio, shown_spread
from bench.report.page import ReportPage, ReportTable
from bench.report.svg import Plot, Series
from bench.session import MeasuredRun, Session
from bench.statistics import distribution
from bench.summary import DEFINITIONS, gaps_during
from bench.systems import ComparedSystem
from bench.traffic.outcome import RequestOutcome

DEFINED = {
    "probe": "A prompt of the length in question, with a short answer. Probes come as a Poisson "
    "stream, the same one for every system, while other streams generate.",
    "disaggregation pays": "from the shortest measured length on from which, at that length and at "
    "every longer one that was measured, the criterion is better on the disaggregated system than "
    "on the colocated one, by the geometric mean over repeats. Between that length and the one "
    "before it the place is read off a straight line (logarithms of both).",
    "criterion": "Goodput of all requests where objectives were given; else the median TTFT of "
    "probes. What the same question gives by the other streams' ITL stands beside it.",
    "confidence": "The repeats are drawn anew 2000 times, with replacement: how often the answer "
    "is the same two neighbouring lengths, or again never, and between which lengths 90 % of the "
    "places lie. Fewer than three repeats give none.",
    "local": "The disaggregated system with local_prefill_max_tokens above any length: decode "
    "nodes prefill all prompts. The recommended local_prefill_max_tokens is the longest measured "
    "length at which a hand-off is not better. By TTFT and by the others' ITL it can be two "
    "answers: which of them matters is for you to say.",
    "ITL of the others under probes": "Gaps of the other streams that overlap a probe's prefill "
    "as its client sees it: from its sending to its first token.",
    "ratio": "The geometric mean over paired repeats, and in brackets where it lies with 95 % "
    "confidence (Student's t on logarithms). " + GOODPUT_FLOOR,
}


@dataclass(frozen=True, slots=True)
class BreakEvenSetting:
    colocated: ComparedSystem
    remote: ComparedSystem  # disaggregated; every prompt is handed over
    local: ComparedSystem  # the same nodes; no prompt is handed over
    lengths: Sequence[int]
    rates: Mapping[int, float]
    shared_cores: int | None = None  # cores of all nodes; None: they have CUDA devices


def _of(one: MeasuredRun, group: str) -> list[RequestOutcome]:
    return [o for o in one.run.outcomes if o.group == group and not o.error]


def _ttft(one: MeasuredRun, _: Mapping[str, Any]) -> float | None:
    p50: float | None = distribution(o.ttft for o in _of(one, "probe") if o.ttft)["p50"]
    return p50


def _ttft_p90(one: MeasuredRun, _: Mapping[str, Any]) -> float | None:
    p90: float | None = distribution(o.ttft for o in _of(one, "probe") if o.ttft)["p90"]
    return p90


def _undisturbed(one: MeasuredRun, _: Mapping[str, Any]) -> float | None:
    if one.x:
        return None
    p50: float | None = distribution(g for o in _of(one, "background") for g in o.gaps)["p50"]
    return p50


def _itl(one: MeasuredRun, _: Mapping[str, Any]) -> float | None:
    """Return the p99 gap during the probes' prefills, or of all gaps in a run without probes."""
    others, probes = _of(one, "background"), _of(one, "probe")
    gaps = gaps_during(others, probes) if one.x else [g for o in others for g in o.gaps]
    p99: float | None = distribution(gaps)["p99"]
    return p99


TTFT = Metric("probe_ttft_p50", "TTFT p50 of probes", _ttft)
TTFT_P90 = Metric("probe_ttft_p90", "TTFT p90 of probes", _ttft_p90)
ITL = Metric("others_itl_p99", "ITL p99 of the others under probes", _itl)
UNDISTURBED = Metric("others_itl_p50", "ITL p50 without probes", _undisturbed)
METRICS = (TTFT, TTFT_P90, ITL, GOODPUT)


def findings(session: Session, about: CommandInfo, setting: BreakEvenSetting) -> Findings:
    grid = Grid(session, (*METRICS, UNDISTURBED))
    criterion = GOODPUT if session.objectives.limits else TTFT
    by = [criterion, *(metric for metric in (TTFT, ITL) if metric is not criterion)]
    answers, knobs = (
        [answer(grid, metric, setting.lengths, setting.remote.name, arm.name) for metric in by]
        for arm in (setting.colocated, setting.local)
    )
    first = answers[0]
    lead = [
        f"Disaggregation pays, by {first.metric.name}: {first.sentence()}.",
        *_shared(grid, setting),
        advised(knobs),
    ]
    page = ReportPage(
        title="Baton bench: from which prompt length disaggregation pays",
        lead=lead,
        headline=_headline(answers, knobs),
        warnings=session.warnings(),
        plots=_plots(grid, setting, answers, knobs) if setting.lengths else (),
        tables=[_table(grid, setting, metric) for metric in METRICS if _has(grid, setting, metric)],
        definitions={**DEFINED, **DEFINITIONS},
        configuration={
            **about.configuration,
            "colocated system": setting.colocated.shape,
            "disaggregated system": setting.remote.shape,
            "probes a second": {str(length): rate for length, rate in setting.rates.items()},
        },
        machine=about.machine,
        made=about.made,
    )
    summary = {
        "criterion": criterion.key,
        "break_even": answers[0].record(),
        "others": [one.record() for one in answers[1:]],
        "shared_cores": setting.shared_cores,
        "local_prefill_max_tokens": {
            "advice": advice(knobs[0]),
            "advice_by": {knob.metric.key: advice(knob) for knob in knobs},
            "answers": [knob.record() for knob in knobs],
        },
        "rows": [_row(grid, setting, length) for length in setting.lengths],
    }
    return Findings(page, summary)


def _shared(grid: Grid, setting: BreakEvenSetting) -> list[str]:
    """Return the warning for prefill and decode nodes that share the same cores."""
    if setting.shared_cores is None:
        return []
    remote, colocated = (
        grid.spread(UNDISTURBED, arm.name, 0) for arm in (setting.remote, setting.colocated)
    )
    cost = remote.against(colocated)
    told = (
        f" Without any probe, the gap between tokens is {shown_ratio(cost)} times that of the "
        "colocated system."
        if cost
        else ""
    )
    return [
        f"Prefill and decode share the {setting.shared_cores} cores of this machine: a prompt is "
        "computed with what the answers that run would have had, and every engine is one more "
        f"process on them.{told} So this is no answer for nodes with cores or devices of their "
        "own; for this machine alone, `baton up --prefill 0` is one engine with all cores."
    ]


def _headline(answers: Sequence[BreakEvenResult], knobs: Sequence[BreakEvenResult]) -> ReportTable:
    rows = [
        (question, one.metric.name, one.sentence())
        for question, found in (
            ("disaggregation pays", answers),
            ("handing over beats prefilling on the decode node", knobs),
        )
        for one in found
    ]
    return ReportTable("In short", ("", "by", "from which prompt length on"), rows)


def _arms(setting: BreakEvenSetting) -> tuple[ComparedSystem, ...]:
    return (setting.colocated, setting.remote, setting.local)


def _has(grid: Grid, setting: BreakEvenSetting, metric: Metric) -> bool:
    return any(
        grid.spread(metric, arm.name, length).values
        for arm in _arms(setting)
        for length in (0, *setting.lengths)
    )


def _table(grid: Grid, setting: BreakEvenSetting, metric: Metric) -> ReportTable:
    rows = []
    for length in (0, *setting.lengths):
        spreads = [grid.spread(metric, arm.name, length) for arm in _arms(setting)]
        colocated, remote, local = spreads
        if not any(spread.values for spread in spreads):
            continue
        rows.append(
            (
                f"{length}" if length else "no probes",
                *(shown_spread(spread) for spread in spreads),
                shown_ratio(remote.against(colocated)),
                shown_ratio(remote.against(local)),
            )
        )
    columns = (
        "prompt tokens",
        "colocated",
        "disaggregated",
        "local",
        "disaggregated / colocated",
        "disaggregated / local",
    )
    return ReportTable(f"{metric.name}, {metric.unit}", columns, rows)


def _plots(
    grid: Grid,
    setting: BreakEvenSetting,
    answers: Sequence[BreakEvenResult],
    knobs: Sequence[BreakEvenResult],
) -> list[Plot]:
    lengths = [float(length) for length in setting.lengths]
    plots = []
    for metric in METRICS:
        if not _has(grid, setting, metric):
            continue
        series = []
        for colour, arm in enumerate(_arms(setting)):
            spreads = [grid.spread(metric, arm.name, length) for length in lengths]
            middles = [s.middle if s.middle is not None else float("nan") for s in spreads]
            lows, highs = [s.low for s in spreads], [s.high for s in spreads]
            series.append(
                Series(arm.name, lengths, middles, lows, highs, colour, dashed=arm is setting.local)
            )
        label = f"{metric.name}, {metric.unit}"
        plots.append(
            Plot(
                metric.name,
                "prompt tokens",
                label,
                series,
                log_x=True,
                log_y=metric.lower_is_better,
                note="Median of the repeats, with their range.",
            )
        )
    for found, arm in ((answers, setting.colocated), (knobs, setting.local)):
        plots += [_ratio_plot(grid, setting, one, arm) for one in found]
    return plots


def _ratio_plot(
    grid: Grid, setting: BreakEvenSetting, answer: BreakEvenResult, arm: ComparedSystem
) -> Plot:
    lengths = [float(length) for length in setting.lengths]
    ratios = [
        grid.spread(answer.metric, setting.remote.name, x).against(
            grid.spread(answer.metric, arm.name, x)
        )
        for x in lengths
    ]
    better = "below" if answer.metric.lower_is_better else "above"
    return Plot(
        f"{answer.metric.name}: disaggregated / {arm.name}",
        "prompt tokens",
        "ratio",
        [
            Series(
                f"disaggregated / {arm.name}",
                lengths,
                [one.mean if one else float("nan") for one in ratios],
                [one.low if one else None for one in ratios],
                [one.high if one else None for one in ratios],
                colour=3,
            )
        ],
        log_x=True,
        log_y=True,
        level=1.0,
        mark=answer.found.at,
        note=f"Handing over is better {better} the line at 1; bars are 95 % confidence, "
        "the upright line is the break-even.",
    )


def _row(grid: Grid, setting: BreakEvenSetting, length: int) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt_tokens": length}
    for metric in METRICS:
        colocated, remote, local = (grid.spread(metric, arm.name, length) for arm in _arms(setting))
        against, knob = remote.against(colocated), remote.against(local)
        row[metric.key] = {
            "unit": metric.unit,
            "colocated": colocated.middle,
            "disaggregated": remote.middle,
            "local": local.middle,
            "to_colocated": against.record() if against else None,
            "to_local": knob.record() if knob else None,
        }
    return row
