"""Waiting times in virtual time agree with queueing theory.

The mean wait of few hundred requests is far from its expectation: at a load of 0.8, that of 400
requests has a standard error of 47 %. So each run is compared with an ideal queue that has the same
arrivals, and the ideal queue with the formula over many more arrivals.
"""

import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest

from simulation.cost.measured import MeasuredStep, StepTable
from simulation.virtual.scenario import read
from tests.simulation.test_virtual import simulate

MODEL = "llama-3-8b"
SEEDS = (1, 2, 3)
LIMIT = 0.03


@dataclass(frozen=True)
class Ideal:
    """A queue of theory: the time of a request in the system, which the formula gives, and which
    `times` computes for each arrival.
    """

    load: float
    service_s: float
    mean_s: float
    times: Callable[[Sequence[float], float], list[float]]

    @property
    def rate(self) -> float:
        return self.load / self.service_s


def served_in_order(arrivals: Sequence[float], service_s: float) -> list[float]:
    """Return the seconds that each request is in a queue with one server."""
    ends = accumulate(arrivals, lambda end, at: max(end, at) + service_s, initial=0.0)
    return [end - at for end, at in zip(list(ends)[1:], arrivals, strict=True)]


def shared(arrivals: Sequence[float], service_s: float) -> list[float]:
    """Return the seconds that each request is in a queue whose server works at all of them at once.
    Requests of equal work end in the order of their arrival."""
    now, done, inside, times = 0.0, 0.0, deque[tuple[float, float]](), []
    for at in (*arrivals, float("inf")):
        while inside and now + (inside[0][0] - done) * len(inside) <= at:
            now, done = now + (inside[0][0] - done) * len(inside), inside[0][0]
            times.append(now - inside.popleft()[1])
        done += (at - now) / len(inside) if inside else 0.0
        now = at
        inside.append((done + service_s, at))
    return times


IN_ORDER = Ideal(0.8, 0.025, 0.025 * (1 + 0.8 / (2 * 0.2)), served_in_order)  # M/D/1
SHARED = Ideal(0.6, 0.05, 0.05 / 0.4, shared)  # M/D/1-PS


def run(directory: Path, **scenario: Any) -> tuple[dict[str, Any], list[float]]:
    """Run a scenario. Returns its report and its arrivals."""
    report = simulate(directory, **scenario)
    assert report["right"] == report["requests"]
    return report, [each.at for each in read(directory / "sim.yaml").arrivals()]


def gpu(directory: Path, step_s: float, more_s: float = 0.0) -> str:
    """Write a table of step times.

    Args:
        step_s: of a prompt, or of one decode row.
        more_s: for each further row.
    """
    file = directory / "steps.json"
    steps = [
        *(MeasuredStep("decode", n, n, 64, step_s + (n - 1) * more_s) for n in (1, 256)),
        *(MeasuredStep("prefill", n, 1, n, step_s) for n in (16, 4096)),
    ]
    table = StepTable(MODEL, "ideal", 10**9, 1000, 1 << 20, 1000, 8192, tuple(steps))
    file.write_bytes(msgspec.json.encode(table))
    return str(file)


def assert_agree(ratios: Sequence[float]) -> None:
    """Check that the mean lies within the limit of 1, with two standard errors."""
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    assert abs(statistics.mean(ratios) - 1) + 2 * error < LIMIT, ratios


@pytest.mark.parametrize("ideal", [IN_ORDER, SHARED], ids=["M/D/1", "processor sharing"])
def test_the_ideal_queues_have_the_times_of_the_formulas(ideal: Ideal) -> None:
    rng = random.Random(1)
    arrivals = list(accumulate(rng.expovariate(ideal.rate) for _ in range(200_000)))
    found = ideal.times(arrivals, ideal.service_s)
    assert statistics.mean(found) == pytest.approx(ideal.mean_s, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("nodes", [{"colocated": 1}, {"prefill": 1, "decode": 1}])
def test_prompts_wait_as_in_a_queue_with_one_server(tmp_path: Path, nodes: dict[str, int]) -> None:
    """Each forward computes one prompt and takes the same time."""
    ratios = []
    for seed in SEEDS:
        service_s = IN_ORDER.service_s
        options = {"engine.scheduler.max_prefill_requests": 1}
        report, arrivals = run(
            tmp_path,
            cluster={"gpu": gpu(tmp_path, service_s), "model": MODEL, "options": options, **nodes},
            load={"rate": IN_ORDER.rate, "input": 100, "output": 1, "requests": 300},
            seed=seed,
        )
        ideal = statistics.mean(IN_ORDER.times(arrivals, service_s)) - service_s
        ratios.append((report["ttft"]["mean"] - service_s) / ideal)
    assert_agree(ratios)


@pytest.mark.long
def test_responses_share_a_node_as_in_theory(tmp_path: Path) -> None:
    """A step takes time in proportion to its rows. Prompts have one token, so each of their steps
    is a row like the others."""
    tokens, ratios = 50, []
    for seed in SEEDS:
        token_s = SHARED.service_s / tokens
        options = {"engine.scheduler.overlap_schedule": False}  # a new row joins the next step
        report, arrivals = run(
            tmp_path,
            cluster={
                "gpu": gpu(tmp_path, token_s, token_s),
                "model": MODEL,
                "colocated": 1,
                "options": options,
            },
            load={"rate": SHARED.rate, "input": 1, "output": tokens, "requests": 200},
            seed=seed,
        )
        ideal = statistics.mean(SHARED.times(arrivals, SHARED.service_s))
        found = report["ttft"]["mean"] + (tokens - 1) * report["tpot"]["mean"]
        ratios.append(found / ideal)
    assert_agree(ratios)
