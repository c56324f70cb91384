"""`baton sim` with operators' commands and options of nodes: every response stays right."""

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from simulation.virtual.operations import Pause, carry_out
from tests.simulation.test_virtual import SMALL, baton_sim, report, written

SPLIT = "cluster: {gpu: h100, model: llama-3-8b, prefill: 2, decode: 3}"
LOAD = "load: {rate: 8, input: 500, output: 150, requests: 60}"


@pytest.mark.long
def test_roles_change_and_requests_migrate_and_a_node_drains(tmp_path: Path) -> None:
    commands = """operations:
      - {set_role: decode/2, role: prefill, at: 1}
      - {migrate: decode/0, at: 2}
      - {drain: decode/1, at: 3}
      - {set_role: prefill/0, role: decode, at: 4}
    """
    found = report(written(tmp_path, "\n".join((SPLIT, LOAD, commands))))
    assert (found["right"], found["wrong"], found["errors"]) == (60, 0, {})
    undisturbed = report(written(tmp_path, "\n".join((SPLIT, LOAD))))
    for name in ("decode/1", "prefill/0"):  # they serve for a part of the time, or in another role
        ratio = found["utilization"][name] / undisturbed["utilization"][name]
        assert not 0.9 < ratio < 1.1


@pytest.mark.long
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_paused_node_launches_no_steps(tmp_path: Path, mode: str) -> None:
    cluster = "cluster: {gpu: h100, model: llama-3-8b, prefill: 1, decode: 1}"
    command = f"operations: [{{pause: decode/0, mode: {mode}, at: 1, seconds: 5}}]"
    load = "load: {rate: 8, input: 500, output: 60, requests: 16}"
    found = report(written(tmp_path, "\n".join((cluster, load, command))))
    if mode == "abort":
        assert found["errors"].keys() == {"RequestAborted"}
        assert found["right"] + found["errors"]["RequestAborted"] == 16
    else:
        assert (found["right"], found["wrong"], found["errors"]) == (16, 0, {})
        assert found["itl"]["max"] > 5


async def test_a_node_resumes_even_if_the_run_ends_before_it_has_paused() -> None:
    cluster, called = AsyncMock(), asyncio.Event()

    async def never(*_: str) -> None:  # as with a frozen engine
        called.set()
        await asyncio.Event().wait()

    cluster.pause.side_effect = never
    paused = asyncio.ensure_future(carry_out(Pause("decode/0", "retract", 0, 1), cluster))
    await asyncio.wait_for(called.wait(), 60)
    paused.cancel()
    await asyncio.gather(paused, return_exceptions=True)
    cluster.resume.assert_awaited_once_with("decode/0")


@pytest.mark.long
def test_a_killed_node_that_restarts_serves_again(tmp_path: Path) -> None:
    """`report` checks that the run breaks no rule: the node is ready at the end."""
    kills = "faults: [{kill: decode/1, at: 1%s}, {kill: prefill/1, at: 2%s}]"
    lost, back = (
        report(written(tmp_path, "\n".join((SPLIT, LOAD, kills % (restart, restart)))))
        for restart in ("", ", restart_s: 1")
    )
    for found in (lost, back):
        assert (found["right"], found["wrong"], found["errors"]) == (60, 0, {})
    for name in ("decode/1", "prefill/1"):
        assert back["utilization"][name] > 1.3 * lost["utilization"][name]


@pytest.mark.long
def test_clients_leave_and_responses_stop_early(tmp_path: Path) -> None:
    load = "load: {rate: 8, input: 500, output: 60, requests: 60, cancels: 0.5, stops: 0.5}"
    found = report(written(tmp_path, "\n".join((SPLIT, load))))
    left = found["errors"].pop("ClientCancelled")
    assert (found["wrong"], found["errors"]) == (0, {})
    assert 5 < left < 40 and found["right"] == 60 - left
    tokens = found["tokens_per_s"] * found["seconds"]
    assert tokens < 0.9 * 60 * found["right"]


@pytest.mark.long
def test_a_command_that_the_cluster_refuses_ends_the_run(tmp_path: Path) -> None:
    commands = "operations: [{migrate: decode/0, at: 0}]"
    done = baton_sim(str(written(tmp_path, "\n".join((SPLIT, LOAD, commands)))))
    assert done.returncode == 2
    assert "operations: decode/0 at 0 s: no request at" in done.stderr
    optional = commands.replace("at: 0", "at: 0, optional: true")
    found = report(written(tmp_path, "\n".join((SPLIT, LOAD, optional))))
    assert (found["right"], found["errors"]) == (60, {})


@pytest.mark.long
def test_retracted_requests_return_from_host_memory(tmp_path: Path) -> None:
    """The pool has room for three of the requests. The others wait in host pages."""
    cluster = "cluster: {gpu: h100, model: llama-3-8b, colocated: 1, options: {%s}}"
    load = "load: {rate: 100, input: 200, output: 200, requests: 12}"
    small = "engine.cache.num_pages: 80, engine.cache.swap_pages: 400"
    found = report(written(tmp_path, "\n".join((cluster % small, load))))
    roomy = report(written(tmp_path, "\n".join((cluster % "", load))))
    for each in (found, roomy):
        assert (each["right"], each["wrong"], each["errors"]) == (12, 0, {})
    assert found["itl"]["max"] > 10 * roomy["itl"]["max"], "no request was retracted"


@pytest.mark.long
def test_first_and_last_requests_are_not_part_of_the_figures(tmp_path: Path) -> None:
    load = "load: {rate: 20, input: 100, output: 50, requests: 30, warm_up: 5, cool_down: 15}"
    found = report(written(tmp_path, f"{SMALL}{load}"))
    assert (found["requests"], found["right"]) == (10, 10)
    assert found["tpot"]["p90"] < found["itl"]["max"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("engine.quantize: int8", "engine.quantize"),
        ("engine.model: other", "engine.model is set by another key"),
        ("engine.model.x: 1", "engine.model.x is set by another key"),
        ("engine.cache.pages: 1", "pages"),
    ],
)
def test_wrong_options_are_refused_by_name(tmp_path: Path, option: str, named: str) -> None:
    cluster = f"cluster: {{gpu: h100, model: llama-3-8b, colocated: 1, options: {{{option}}}}}"
    done = baton_sim(str(written(tmp_path, f"{SMALL}{cluster}")))
    assert done.returncode == 2
    assert named in done.stderr


@pytest.mark.long
def test_the_planner_changes_roles_to_fit_the_load(tmp_path: Path) -> None:
    cluster = """cluster:
      {gpu: h100, model: llama-3-8b, prefill: 3, decode: 1, options: {engine.cache.num_pages: 600}}
    """
    load = "load: {rate: 12, input: 300, output: 300, requests: 140}"
    planner = "planner: {every_s: 0.5, sustained_s: 2, settle_s: 2}"
    fixed = report(written(tmp_path, "\n".join((cluster, load))))
    planned = report(written(tmp_path, "\n".join((cluster, load, planner))))
    for found in (fixed, planned):
        assert (found["right"], found["wrong"], found["errors"]) == (140, 0, {})
    assert [*fixed["roles"].values()].count("decode") == 1
    assert [*planned["roles"].values()].count("decode") in (2, 3)
    assert planned["ttft"]["p90"] < fixed["ttft"]["p90"]
