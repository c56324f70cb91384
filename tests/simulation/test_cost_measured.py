"""Step times from a file, and the command that writes it."""

import json
import sys

import msgspec
import pytest

from bench.__main__ import main
from cli.demo_model import write
from simulation.cost import StepCost, StepShape
from simulation.cost.measured import MeasuredStep, StepTable
from simulation.plan import Hardware, LatencyTargets, Traffic, make_plan

MS = 1e-3


def decode_s(rows, context):
    """10 ms for the weights, 1 ms a row, 1 us for each 10 cached tokens."""
    return 10 * MS + rows * MS + 1e-7 * rows * (context - 1)


def prefill_s(tokens, context):
    return 10 * MS + 0.1 * MS * tokens + 1e-7 * tokens * (context - tokens)


def table(**changes):
    steps = [
        *(
            MeasuredStep("decode", rows, rows, context, decode_s(rows, context))
            for rows in (1, 4, 16)
            for context in (64, 512, 2048)
        ),
        *(
            MeasuredStep("prefill", tokens, 1, context, prefill_s(tokens, context))
            for tokens, context in ((16, 16), (128, 128), (512, 512), (512, 1024), (512, 2048))
        ),
    ]
    made = StepTable("model", "machine", 10**9, 1000, 100_000, 1000, 4096, tuple(steps))
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def cost_of(tmp_path):
    def of(content, model="some/model", tp=1):
        file = tmp_path / "steps.json"
        file.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
        return StepCost.of(str(file), model, tp)

    return of


def test_a_table_gives_the_times_between_and_beyond_its_points(cost_of):
    cost = cost_of(table())
    for rows, context in ((1, 64), (3, 300), (16, 2048), (32, 4000)):
        shape = StepShape((1,) * rows, (context,) * rows)
        assert cost.step_s(shape) == pytest.approx(decode_s(rows, context), rel=0.01)
    for tokens, context in ((16, 16), (300, 300), (512, 1500), (1000, 3000)):
        shape = StepShape((tokens,), (context,))
        assert cost.step_s(shape) == pytest.approx(prefill_s(tokens, context), rel=0.01)
    mixed = StepShape((512, 1, 1), (512, 64, 64))
    assert prefill_s(512, 512) < cost.step_s(mixed) < prefill_s(512, 512) + 3 * MS
    assert (cost.kv_capacity_tokens, cost.vocabulary) == (100_000, 1000)


def test_a_file_that_cannot_be_right_is_refused_with_its_name(cost_of):
    prefills = tuple(step for step in table().steps if step.mode == "prefill")
    impossible = (MeasuredStep("decode", 1, 2, 64, 0.1), *table().steps)
    for content, sentence in (
        (b"[]", "steps.json: Expected `object`"),
        (b"[" * 100_000, "steps.json: "),
        (table(steps=prefills), "fewer than two sizes of decode steps"),
        (table(steps=impossible), "is impossible"),
        (table(kv_capacity_tokens=0), "at least 1"),
        (table(model="other"), "of model 'other', not of 'some/model'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            cost_of(content)
    with pytest.raises(ValueError, match="of one rank"):
        cost_of(table(), tp=2)


def test_bench_steps_refuses_what_it_cannot_time(tmp_path, monkeypatch, capsys):
    for flags, sentence in (
        (("--engine.parallel.tp=2",), "engine.parallel: steps of one rank"),
        (("--engine.speculative.method=ngram",), "engine.speculative.method: steps with drafts"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench", "steps", f"--model={tmp_path}", *flags])
        assert main() == 2
        assert sentence in capsys.readouterr().err


def test_bench_steps_writes_a_file_for_plans(tmp_path, monkeypatch, capsys):
    model, file = tmp_path / "demo", tmp_path / "steps.json"
    write(model)
    flags = (
        "--device=cpu",
        "--engine.threads=1",
        "--engine.cache.num-pages=64",
        f"--model={model}",
    )
    points = ("--rows=1,2,1000", "--contexts=32", "--prompts=16,80", "--steps=2", "--repeats=1")
    chunks = ("--engine.scheduler.chunked-prefill-tokens=64",)
    monkeypatch.setattr(sys, "argv", ["bench", "steps", *flags, *points, *chunks, f"--out={file}"])
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 5
    steps = StepTable.read(file).steps
    kinds = [(step.mode, step.tokens, step.context) for step in steps]
    assert kinds == [
        ("decode", 1, 32),
        ("decode", 2, 32),
        ("prefill", 16, 16),
        ("prefill", 64, 64),
        ("prefill", 16, 80),  # the second chunk
    ]
    plan = make_plan(
        Hardware(2, str(file), str(model), "tcp25"),
        Traffic.uniform(0.1, 32, 8),
        LatencyTargets(60, 60),
    )
    assert all(each.capacity > 0 for each in plan.candidates)
