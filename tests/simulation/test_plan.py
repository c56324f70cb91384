"""`baton plan`: closed forms against theory, and the command as a user calls it."""

import json
import sys

import pytest

from cli import plan as command
from simulation.plan import Hardware, LatencyTargets, Traffic, make_plan
from simulation.plan.forecasts import percentile, waiting

LOAD = Traffic.uniform(30.0, 2000, 250)
CLUSTER = Hardware(8, "h100", "llama-3-8b", "rdma400")
FLAGS = ("--model=llama-3-8b", "--ttft=0.5", "--tpot=0.012", "--verify=0", "--gpus")


def baton_plan(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["baton plan", *flags])
    return command.main()


def test_waits_are_those_of_theory():
    one = waiting(1, rate=0.8, service=1.0, variation=1.0)  # M/M/1
    assert (one.probability, one.mean) == (pytest.approx(0.8), pytest.approx(5.0))
    assert waiting(2, rate=1.5, service=1.0, variation=1.0).probability == pytest.approx(9 / 14)
    fixed = waiting(1, rate=0.8, service=1.0, variation=0.0)  # M/D/1
    assert fixed.probability * fixed.mean == pytest.approx(2.0)
    assert percentile(0.9, one, [1.0]) == pytest.approx(1 + 5 * 2.0794, rel=1e-3)  # ln 8


def test_strict_tpot_favours_disaggregation_and_lenient_limits_do_not():
    strict = make_plan(CLUSTER, LOAD, LatencyTargets(0.5, 0.012))
    assert strict.candidates[0].layout.prefill
    assert strict.verdict.startswith("Disaggregated nodes are better")
    lenient = make_plan(CLUSTER, LOAD, LatencyTargets(0.5, 0.05))
    assert "tie" in lenient.verdict or lenient.verdict.startswith("Colocated")
    assert lenient.candidates[0].tie
    for plan in (strict, lenient):
        for each in plan.candidates:
            assert each.layout.gpus <= 8
            assert bool(each.layout.prefill) != bool(each.layout.chunk)


def test_the_first_bottleneck_is_named():
    slow_link = Hardware(8, "h100", "llama-3-8b", "tcp25")
    for hardware, targets, expected in (
        (slow_link, LatencyTargets(0.5, 0.05), "link"),
        (CLUSTER, LatencyTargets(0.5, 0.007), "TPOT"),
        (CLUSTER, LatencyTargets(0.045, 0.05), "TTFT"),
    ):
        best = make_plan(hardware, LOAD, targets).best(disaggregated=True)
        assert best.bottleneck == expected
    nothing = make_plan(CLUSTER, LOAD, LatencyTargets(0.001, 0.05))
    assert nothing.verdict == "No layout meets the objectives at any rate."


def test_the_command_prints_a_table_a_verdict_and_flags_for_baton_up(monkeypatch, capsys):
    load = ("--rate=30", "--input=2000", "--output=250")
    assert baton_plan(monkeypatch, *FLAGS, "8xH100", *load) == 0
    text = capsys.readouterr().out
    assert "simulated max requests/s +-20%" in text and "colocated, chunks of" in text
    assert "Disaggregated nodes are better" in text
    assert "baton up --model DIR --prefill " in text
    assert baton_plan(monkeypatch, *FLAGS, "8xH100", *load, "--json", "--top=2") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] and found["band"]["requests"] == 0.2
    assert found["layouts"][0]["capacity"] >= found["layouts"][1]["capacity"] > 30
    assert found["layouts"][-1]["layout"]["chunk"] > 0  # the best colocated one in any case


def test_runs_in_virtual_time_end_at_their_limit(monkeypatch, capsys):
    load = ("2xH100", "--rate=5", "--input=500", "--output=20")
    assert baton_plan(monkeypatch, *FLAGS, *load, "--verify=1", "--verify-limit=0.01") == 0
    text = capsys.readouterr().out
    assert "1 prefill + 1 decode" in text and text.count("no time left") == 2
    assert "In virtual time, no layout was found" in text


@pytest.mark.long
def test_virtual_time_and_closed_forms_agree(monkeypatch, capsys):
    load = ("2xH100", "--rate=5", "--input=2000", "--output=30", "--json")
    assert baton_plan(monkeypatch, *FLAGS, *load, "--verify=1") == 0
    found = json.loads(capsys.readouterr().out)["verified"]
    assert sorted("colocated" in each["name"] for each in found["layouts"]) == [False, True]
    for each in found["layouts"]:
        assert each["capacity"] == pytest.approx(each["closed_form"], rel=0.3)
        within = [run["ttft"] <= 0.5 and run["tpot"] <= 0.012 for run in each["runs"]]
        assert within == sorted(within, reverse=True), "the runs are in order of their rates"
        assert within[0] and not within[-1], "the capacity is between two runs"


def test_a_trace_gives_lengths_and_rate(tmp_path, monkeypatch, capsys):
    file = tmp_path / "load.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 1000 + i, "output_length": 100, "hash_ids": [i]}
        for i in range(1000)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    traffic = Traffic.read(file)
    assert traffic.rate == pytest.approx(10.0)
    assert traffic.input == pytest.approx(1500, rel=0.1) and traffic.output == 100
    assert baton_plan(monkeypatch, *FLAGS, "2xh200", f"--load={file}") == 0
    assert "Shared prefixes" in capsys.readouterr().out


def test_wrong_flags_end_with_one_sentence(tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input_length": 0, "output_length": 1}\n')
    load = ("--rate=1", "--input=100", "--output=10")
    for flags, sentence in (
        (("16xH100",), "the load is missing"),
        (("16xH900", *load), "gpu 'H900' is not supported"),
        (("H100", *load), "expected a form like 16xH100"),
        (("2000xH100", *load), "2000 GPUs: expected 1 to 512"),
        (("4xH100", "--rate=1", "--input=9000", "--output=10"), "exceeds the context of 8192"),
        (("4xH100", f"--load={bad}"), "bad.jsonl, line 1: input_length"),
        (("4xH100", f"--load={bad}", "--input=1"), "--load has the lengths"),
    ):
        with pytest.raises(SystemExit) as ended:
            baton_plan(monkeypatch, *FLAGS, *flags)
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("model", ["gemma-3-12b", "qwen3-next-80b-a3b"])
def test_models_with_windows_or_states_are_refused_and_not_offered(model):
    offered = command.parser().format_help()
    assert "qwen3-8b" in offered and model not in offered
    with pytest.raises(ValueError, match="windows or states"):
        make_plan(Hardware(8, "h100", model, "rdma400"), LOAD, LatencyTargets(0.5, 0.05))
