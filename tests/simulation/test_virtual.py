"""`baton sim`: clusters in virtual time, from outside."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from simulation.cost import StepCost
from simulation.cost.models import StepShape
from simulation.virtual.clock import VirtualClock
from simulation.virtual.loop import Deadlock, VirtualLoop
from simulation.virtual.process import command, environment
from simulation.virtual.scenario import read
from tests.support.runner.isolation import ROOT

T = TypeVar("T")
EXAMPLE = ROOT / "docs" / "assets" / "sim.yaml"
SMALL = """
cluster: {gpu: h100, model: llama-3-8b, prefill: 1, decode: 1}
load: {rate: 20, input: 100, output: 5, requests: 6}
"""


def baton_sim(*arguments: str, hash_seed: str = "1") -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "cli.main", "sim", *arguments]
    given = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(line, env=given, capture_output=True, text=True, timeout=120)


def report(file: Path, hash_seed: str = "1") -> Any:
    done = baton_sim(str(file), "--json", hash_seed=hash_seed)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def simulate(directory: Path, **scenario: Any) -> Any:
    """Run a scenario without the rest of the command. Returns its report."""
    file = written(directory, json.dumps(scenario))
    done = subprocess.run(
        command(str(file)), env=environment(), stdout=subprocess.PIPE, check=True, timeout=300
    )
    return json.loads(done.stdout)


def written(directory: Path, text: str) -> Path:
    file = directory / "sim.yaml"
    file.write_text(text)
    return file


def test_a_run_repeats_exactly_in_another_process(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL)
    first, second = report(file, "1"), report(file, "2")
    assert first == second
    assert (first["right"], first["wrong"], first["errors"]) == (6, 0, {})
    assert first["simulated"] and first["band"] > 0
    assert 0 < first["itl"]["p50"] < first["ttft"]["p50"] < 1


@pytest.mark.long
def test_a_killed_decode_node_loses_no_request() -> None:
    found = report(EXAMPLE)
    assert (found["right"], found["wrong"], found["errors"]) == (40, 0, {})
    busy = found["utilization"]
    assert 0 < busy["decode/1"] < busy["decode/0"], "it ended before the other one"


@pytest.mark.long
def test_a_frozen_engine_is_replaced(tmp_path: Path) -> None:
    cluster = "cluster: {gpu: h100, model: llama-3-8b, prefill: 1, decode: 2}"
    load = "load: {rate: 4, input: 200, output: 60, requests: 40}"
    faults = "faults: [{freeze: decode/0, at: 2, seconds: 60}]"
    found = report(written(tmp_path, "\n".join((cluster, load, faults))))
    assert (found["right"], found["wrong"], found["errors"]) == (40, 0, {})
    # Its requests continue elsewhere after router.dead_after_s, not after the freeze.
    assert 5 < max(found["itl"]["max"], found["ttft"]["max"]) < 20


@pytest.mark.long
def test_colocated_nodes_and_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = ({"timestamp": 50 * i, "input_length": 40 + i, "output_length": 4} for i in range(9))
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    cluster = "cluster: {gpu: h200, model: llama-3-8b, colocated: 2}"
    file = written(tmp_path, f"{cluster}\nload: {{trace: {trace}, requests: 8}}\npolicy: random")
    assert report(file)["right"] == 8


@pytest.mark.long
def test_another_seed_gives_other_times(tmp_path: Path) -> None:
    first = report(written(tmp_path, SMALL))
    second = report(written(tmp_path, f"{SMALL}seed: 2"))
    assert second["right"] == 6 and second["hash"] != first["hash"]


@pytest.mark.long
def test_a_token_takes_the_time_of_the_cost_model(tmp_path: Path) -> None:
    load = "load: {rate: 1, input: 1000, output: 50, requests: 1}"
    found = report(written(tmp_path, f"{SMALL}{load}"))
    cost = StepCost.of("h100", "llama-3-8b")
    assert found["itl"]["p50"] == pytest.approx(cost.step_s(StepShape((1,), (1025,))), rel=0.01)
    prompt = cost.step_s(StepShape((1000,), (1000,)))
    assert prompt < found["ttft"]["p50"] < 1.5 * prompt


def in_virtual_time(clock: VirtualClock, waiting: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(waiting)


def test_time_jumps_to_the_next_timer(clock: VirtualClock) -> None:
    ends = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        ends.append(time.monotonic())

    async def all_sleep() -> float:
        begin = time.monotonic()
        await asyncio.gather(sleeper(7200), sleeper(3600), sleeper(0.001))
        return begin

    begin = in_virtual_time(clock, all_sleep())
    assert [end - begin for end in ends] == pytest.approx([0.001, 3600, 7200])


def test_sockets_come_before_timers(clock: VirtualClock) -> None:
    async def received() -> tuple[bytes, float]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.send(b"x")
            async with asyncio.timeout(0.001):
                data = await asyncio.get_running_loop().sock_recv(ours, 1)
            return data, time.monotonic()

    before = clock.now
    assert in_virtual_time(clock, received()) == (b"x", before)


def test_a_deadlock_lists_the_waiters(clock: VirtualClock) -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"no timer is set(.|\n)*waits: Event\.wait"):
        in_virtual_time(clock, waits_for_ever())


def test_work_without_progress_is_a_deadlock(clock: VirtualClock) -> None:
    async def spins() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"never read")
            asyncio.get_running_loop().add_reader(ours, lambda: None)
            try:
                await asyncio.Event().wait()
            finally:
                asyncio.get_running_loop().remove_reader(ours)

    with pytest.raises(Deadlock, match="repeats at one instant"):
        in_virtual_time(clock, spins())


def test_a_trace_is_sorted_and_shares_prefixes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [7, 8]},
        {"timestamp": 1000, "input_length": 700, "output_length": 3, "hash_ids": [7, 9]},
    )
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    cluster = "cluster: {gpu: h100, model: llama-3-8b, colocated: 1}"
    found = list(read(written(tmp_path, f"{cluster}\nload: {{trace: {trace}}}")).arrivals())
    assert [(each.at, len(each.prompt), each.output) for each in found] == [
        (0, 700, 3),
        (2, 600, 2),
    ]
    first, second = (each.prompt for each in found)
    assert first[:512] == second[:512] and first[512:600] != second[512:600]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("planner: true", "planner"),
        ("policy: best", "best"),
        ("policy: session_affinity", "session_affinity"),
        ("faults: [{kill: decode/7, at: 1}]", "decode/7"),
        ("faults: [{freeze: decode/0, at: 1}]", "seconds"),
        ("faults: [{kill: decode/0, at: 1, seconds: 1}]", "seconds"),
        ("faults: [{at: 1}]", "expected one of kill, freeze"),
        ("faults: [3]", r"expected one of kill.*faults\[0\]"),
        ("faults: [{kill: decode/0, freeze: decode/0, at: 1}]", "expected one of kill, freeze"),
        ("faults: [{cut: decode/0, at: 1, seconds: 1}]", "cut: .*array"),
        ("faults: [{cut: [decode/0], at: 1, seconds: 1}]", "cut: .*length 2"),
        ("faults: [{cut: [decode/0, decode/9], at: 1, seconds: 1}]", "'decode/9'"),
        ("faults: [{cut: [decode/0, decode/0], at: 1, seconds: 1}]", "two different processes"),
        ("faults: [{cut: [decode/0, router], seconds: 1}]", "cut: .*`at`"),
        ("faults: [{half_open: [decode/0, router], at: 1, seconds: -1}]", "half_open: .*seconds"),
        ("faults: [{slow_link: [decode/0, router], at: 1, seconds: 1}]", "slow_link: .*factor"),
        ("faults: [{slow_device: router, factor: 2, at: 1, seconds: 1}]", "'router'"),
        ("faults: [{slow_device: decode/0, factor: 0.5, at: 1, seconds: 1}]", "factor"),
        ("cluster: {gpu: h100, model: llama-3-8b, decode: 1}", "prefill"),
        ("cluster: {gpu: h100, model: llama-3-8b, colocated: 1, tp: 2}", "tp"),
        ("load: {rate: 1, input: 5, output: 5}", "requests"),
        ("load: {trace: x, rate: 1}", "load.rate"),
        ("operations: [{drain: decode/7, at: 1}]", "decode/7"),
        ("planner: {act: true}", "act"),
        ("planner: {every_s: 0}", "every_s"),
        ("operations: [{at: 1}]", "one of set_role, drain, migrate, pause"),
        ("operations: [{drain: decode/0, migrate: decode/0, at: 1}]", "one of set_role"),
        ("operations: [{pause: decode/0, mode: sleep, at: 1, seconds: 1}]", "sleep"),
        ("operations: [{set_role: decode/0, at: 1}]", "role"),
        ("operations: [{drain: decode/0, role: prefill, at: 1}]", "role"),
        ("operations: [{set_role: decode/0, role: router, at: 1}]", "router"),
    ],
)
def test_unsupported_keys_are_refused_by_name(tmp_path: Path, line: str, named: str) -> None:
    file = written(tmp_path, f"{SMALL}{line}\n")
    with pytest.raises(ValueError, match=named):
        read(file)


@pytest.mark.long
def test_an_invalid_file_is_a_usage_error(tmp_path: Path) -> None:
    done = baton_sim(str(written(tmp_path, f"{SMALL}planner: true")))
    assert done.returncode == 2
    assert done.stderr.startswith("baton sim: ") and "planner" in done.stderr
