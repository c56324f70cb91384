"""Conclusions of `compare` and `break-even` from measurements with known results."""

import pytest

from bench.commands import break_even_report, compare_report
from bench.report.page import write
from bench.session import MeasuredRun, ProgressView, Session
from bench.summary import Objectives
from bench.systems import ComparedSystem
from bench.traffic.load import LoadRun, RequestOutcome
from tests.bench.pages import Page

SYSTEMS = COLOCATED, REMOTE, LOCAL = (
    ComparedSystem("colocated", 0, 2),
    ComparedSystem("disaggregated", 1, 1),
    ComparedSystem("local", 1, 1),
)


def _session(objectives=None):
    return Session(ProgressView(), Objectives(objectives or {}))


def _outcome(group, due, first, gaps=(), **fields):
    chunks = [due + first]
    for gap in gaps:
        chunks.append(chunks[-1] + gap)
    tokens = len(chunks)
    return RequestOutcome(
        group,
        8,
        due,
        due,
        chunks,
        output_tokens=tokens,
        usage_reported=True,
        ended=chunks[-1],
        **fields,
    )


def _add(session, system, x, repeat, outcomes, complete=True):
    run = LoadRun(list(outcomes), len(outcomes), ended=1.0 if complete else None)
    session.measured.append(MeasuredRun(system, f"{x:g}", float(x), repeat, run))


def _break_even(
    ttft, *, repeats=3, lengths=(64, 128, 256, 512), objectives=None, gap=None, shared_cores=None
):
    """Return findings in which the probes' TTFT is `ttft(system, length, repeat)`, and the ITL
    of other streams without probes is `gap(system)`."""
    session = _session(objectives)
    for repeat in range(repeats):
        for arm in (COLOCATED, REMOTE, LOCAL):
            for length in lengths:
                probes = [
                    _outcome("probe", 0.1 * n, ttft(arm.name, length, repeat)) for n in (0, 1)
                ]
                others = [_outcome("background", 0.0, 0.01, [0.02] * 20)]
                _add(session, arm.name, length, repeat, [*probes, *others])
            if gap is not None:
                alone = _outcome("background", 0.0, 0.01, [gap(arm.name)] * 20)
                _add(session, arm.name, 0, repeat, [alone])
    rates = dict.fromkeys(lengths, 2.0)
    return break_even_report.findings(
        session, SYSTEMS, lengths=lengths, rates=rates, shared_cores=shared_cores
    )


def _hop(system, length, repeat):
    """A hop of 0.1 s, then twice as fast as colocated. Break-even is at 200 tokens, and at 100
    relative to local."""
    return {
        "colocated": length / 1000,
        "disaggregated": 0.1 + length / 2000,
        "local": length / 500,
    }[system] * (1 + 0.001 * repeat)


def test_the_break_even_is_between_the_lengths_around_it(tmp_path):
    found = _break_even(_hop)
    said = found.summary["break_even"]
    assert (said["not_yet_at"], said["everywhere_from"]) == (128.0, 256.0)
    assert said["tokens"] == pytest.approx(200, rel=0.1)
    assert (said["by"], said["same_share"]) == ("probe_ttft_p50", 1.0)
    assert found.summary["local_prefill_max_tokens"]["advice"] == 64
    assert "from about 20" in found.page.lead[0]
    assert "--local-prefill-max-tokens=64 if TTFT p50 of probes matters" in found.page.lead[-1]
    # The other streams are as fast on all systems, so a hand-off never helps them.
    assert (
        "--local-prefill-max-tokens of at least 512 if ITL p99 of the others" in found.page.lead[-1]
    )
    write(found.page, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert len(page.plots) == 7
    assert "128" in page.cells and "1 prefill + 1 decode" in page.text


def test_on_a_cpu_the_report_says_that_prefill_and_decode_share_cores_and_the_cost():
    found = _break_even(
        _hop, gap=lambda system: 0.03 if system == "disaggregated" else 0.02, shared_cores=2
    )
    assert found.summary["shared_cores"] == 2
    said = found.page.lead[1]
    assert said.startswith("Prefill and decode share the 2 cores of this machine")
    assert "is 1.50 (1.50 to 1.50) times that of the colocated system" in said
    on_devices = _break_even(_hop, gap=lambda system: 0.02)
    assert not any("share" in sentence for sentence in on_devices.page.lead)


def test_without_a_quiet_run_the_report_still_says_that_cores_are_shared():
    found = _break_even(_hop, shared_cores=2)
    assert "share the 2 cores" in found.page.lead[1]
    assert "Without probes" not in found.page.lead[1]


def test_break_even_may_be_never():
    found = _break_even(lambda system, length, repeat: 0.2 if system == "disaggregated" else 0.1)
    assert found.summary["break_even"]["tokens"] is None
    assert "never in the range of 64 to 512 tokens" in found.page.lead[0]
    assert found.summary["local_prefill_max_tokens"]["advice"] == 512


def test_break_even_may_be_at_every_length():
    found = _break_even(lambda system, length, repeat: 0.1 if system == "disaggregated" else 0.2)
    assert "from the shortest measured length of 64 tokens" in found.page.lead[0]
    assert found.summary["local_prefill_max_tokens"]["advice"] == 0


def test_break_even_by_goodput_counts_runs_without_a_good_request():
    def ttft(system, length, repeat):  # colocated meets no objective from 256 tokens on
        return 5.0 if system != "disaggregated" and length >= 256 else 0.1

    limits = {"ttft": 1.0, "itl": 0.01}  # which the other streams never meet
    found = _break_even(ttft, objectives=limits)
    said = found.summary["break_even"]
    assert (said["by"], said["everywhere_from"]) == ("goodput", 256.0)


def test_two_repeats_give_no_confidence():
    found = _break_even(_hop, repeats=2)
    assert found.summary["break_even"]["same_share"] is None
    assert "too few repeats" in found.page.lead[0]


def test_an_interrupted_break_even_uses_the_results_that_all_systems_have():
    session = _session()
    for arm in (COLOCATED, REMOTE):
        for length, ttft in ((64, 0.2 if arm is REMOTE else 0.1), (128, 0.1)):
            complete = length == 64 or arm is COLOCATED
            _add(session, arm.name, length, 0, [_outcome("probe", 0.0, ttft)], complete)
    found = break_even_report.findings(session, SYSTEMS, lengths=(64, 128), rates={})
    assert "never in the range of 64 to 64 tokens" in found.page.lead[0]
    assert found.summary["local_prefill_max_tokens"]["advice"] is None
    assert break_even_report.findings(_session(), SYSTEMS, lengths=(), rates={}).page.lead


def _compared(slow_itl, repeats=3):
    """Return findings in which long prefills cause gaps of `slow_itl(repeat)` on the colocated
    system."""
    session = _session({"ttft": 1.0})
    for repeat in range(repeats):
        for arm in (COLOCATED, REMOTE):
            slow = slow_itl(repeat) if arm is COLOCATED else 0.02
            short = _outcome("", 0.0, 0.1, [0.01, 0.01, slow, 0.01])
            long = _outcome("long", 0.13, 0.03, [0.01])
            _add(session, arm.name, 2.0, repeat, [short, long])
    return compare_report.findings(
        session, (COLOCATED, REMOTE), rates=(2.0,), capacity=None, objectives_given=True
    )


def test_a_comparison_says_better_if_repeats_agree(tmp_path):
    found = _compared(lambda repeat: 0.1 + 0.001 * repeat)
    (row,) = found.summary["rows"]
    under = row["itl_p99_under_long"]
    assert under["to_colocated"]["verdict"] == "better"
    assert under["to_colocated"]["mean"] == pytest.approx(0.2, rel=0.1)
    assert row["ttft_p50"]["to_colocated"]["mean"] == 1.0
    write(found.page, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert "better" in page.cells
    assert f"{under['disaggregated']:.3g} ({under['disaggregated']:.3g} to" in page.text


def test_a_comparison_says_undecided_if_repeats_disagree():
    found = _compared(lambda repeat: (0.1, 0.005, 0.02)[repeat])
    (row,) = found.summary["rows"]
    assert row["itl_p99_under_long"]["to_colocated"]["verdict"] == "undecided"
