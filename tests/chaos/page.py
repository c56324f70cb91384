"""The report of a storm, as one HTML page."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from bench.facts import machine
from bench.report.page import ReportPage, ReportTable, write
from bench.report.svg import Plot, Series
from tests.attack.load import percentile
from tests.chaos.site import NUM_NODES, NUM_PROCESSES, Sample
from tests.chaos.storm import Report

_DEFINITIONS = {
    "round": "One fault, or two of different roles at once. The next one comes when everything is "
    "as it was: nodes ready, paired with all others, all processes of the router answering.",
    "recovery": "From the end of the fault (of a stop, SIGCONT; else the signal or call) until "
    "then. Programs that have ended are started again at once, and load their model.",
    "broken": "An answer that broke off, or was refused, and was asked for again. Where no process "
    "of the router has ended there may be none.",
    "wrong": "An answer that differs from the one that the same question had before.",
}


def write_page(report: Report, file: Path) -> None:
    write(page(report), file)


def page(report: Report) -> ReportPage:
    verdict = (
        "Nothing was lost" if not report.complaints else f"{len(report.complaints)} complaints"
    )
    return ReportPage(
        title=f"Chaos, seed {report.seed}",
        lead=[
            f"{verdict} in {report.seconds / 60:.1f} minutes, {len(report.rounds)} rounds and "
            f"{report.num_right} answers, all of which were compared."
        ],
        headline=ReportTable(
            "Answers",
            ("", "right", "broken", "p50 s", "p99 s", "slowest s", "undisturbed p99 s"),
            [
                (
                    "all",
                    str(report.num_right),
                    str(len(report.broken)),
                    *(
                        f"{each:.2f}"
                        for each in (
                            report.p50_s,
                            report.p99_s,
                            report.slowest_s,
                            report.calm_p99_s,
                        )
                    ),
                )
            ],
        ),
        warnings=report.complaints,
        plots=[
            _plot(report, "Memory of all programs", "MiB", lambda s: s.memory_bytes / 2**20),
            _plot(report, "Open descriptors", "descriptors", lambda s: s.descriptors),
            _plot(report, "Threads", "threads", lambda s: s.threads),
        ],
        tables=[_recoveries(report), _rounds(report), _broken(report), _counters(report)],
        definitions=_DEFINITIONS,
        configuration={
            "seed": report.seed,
            "nodes": f"{NUM_NODES} prefill, {NUM_NODES} decode",
            "router": f"{NUM_PROCESSES} processes",
        },
        machine=machine(),
        made=f"{datetime.now().astimezone():%F %T %Z}",
    )


def _plot(report: Report, title: str, label: str, value: Callable[[Sample], float]) -> Plot:
    xs = [each.at_s for each in report.samples]
    ys = [value(each) for each in report.samples]
    return Plot(title, "s", label, [Series(label, xs, ys)], note="whenever everything was well")


def _recoveries(report: Report) -> ReportTable:
    by_name: dict[str, list[float]] = {}
    for each in report.rounds:
        by_name.setdefault(" + ".join(each.names), []).append(each.until_s - each.done_s)
    rows = [
        (name, str(len(took)), f"{percentile(took, 50):.1f}", f"{percentile(took, 99):.1f}")
        for name, took in sorted(by_name.items())
    ]
    return ReportTable("Recovery by fault", ("fault", "rounds", "p50 s", "p99 s"), rows)


def _rounds(report: Report) -> ReportTable:
    rows = [
        (f"{each.at_s:.1f}", " + ".join(each.faults), f"{each.until_s - each.done_s:.1f}")
        for each in report.rounds
    ]
    return ReportTable("Rounds", ("at s", "what", "recovery s"), rows)


def _broken(report: Report) -> ReportTable:
    return ReportTable(
        "Answers that were asked for again", ("",), [(each,) for each in report.broken]
    )


def _counters(report: Report) -> ReportTable:
    rows = [(name, f"{value:g}") for name, value in report.counters.items()]
    return ReportTable("What the router counted", ("metric", "value"), rows)
