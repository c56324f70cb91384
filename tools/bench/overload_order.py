"""Simulate four queue orders and admission rules of an overloaded node.

    python -m tools.bench.overload_order [--times 5]

One node computes one prompt after the other, 20 a second. It gets `--times` as many Poisson
arrivals, with prompts of 256 to 1,024 tokens and the budgets of tools/bench/overload.py. Requests
may spend `--share` of their budget in the queue. The product's own test,
`common.queueing.waiting_line`, admits or refuses a request. Requests that are not started in time
are dropped. A run is simulated and deterministic.

    newest   last in, first out; admits requests as if the queue were empty
    fcfs     first in, first out; admits requests that can start in time behind all others
    slack    earliest latest-start time first; admits requests that make no request late
    pressed  as slack; during refusals no request may wait longer than the refused ones could
"""

import argparse
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from common.queueing.waiting_line import QueueEntry, QueueModel
from router.policy.pressure import PoolPressure
from tools.bench.overload import CLASSES, SHARES
from tools.bench.support.record import emit, percentiles, table

PER_S = 20.0  # prompts of mean length
MEAN_TOKENS = 640
TOKEN_S = 1.0 / (PER_S * MEAN_TOKENS)
COLUMNS = {
    "order": "{order}",
    "load": "{times:g} x",
    "of capacity": "{of_capacity:.0%}",
    "TTFT ms p50": "{ttft_ms[p50]:.0f}",
    "p99": "{ttft_ms[p99]:.0f}",
    "refused at once": "{refused:.0%}",
    "dropped later": "{dropped:.0%}",
    **{name: f"{{answered[{name}]:.0%}}" for name in CLASSES},
}


@dataclass(frozen=True, slots=True)
class Prompt:
    at: float
    tokens: int
    group: str
    start_by: float


@dataclass(slots=True)
class Counts:
    """Counts of one run. answered: prompts that were started in time, by class; ttft: of those."""

    came: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    dropped: int = 0
    busy_s: float = 0.0
    ttft: list[float] = field(default_factory=list)


# The order of waiting requests, and the position of a new one among them.
ORDERS: dict[str, Callable[[Prompt], float]] = {
    "newest": lambda prompt: -prompt.at,
    "fcfs": lambda prompt: prompt.at,
    "slack": lambda prompt: prompt.start_by,
    "pressed": lambda prompt: prompt.start_by,
}


def main() -> None:
    options = _options()
    rows = [_row(name, times, options) for times in (1.0, options.times) for name in ORDERS]
    table(rows, COLUMNS)
    emit("overload_order", vars(options), rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.overload_order", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--times", type=float, default=5.0, help="capacity, of the overload")
    parser.add_argument("--seconds", type=float, default=600.0, help="of simulated time")
    parser.add_argument("--share", type=float, default=0.1, help="of a budget, that may be waited")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def _row(name: str, times: float, options: argparse.Namespace) -> dict[str, Any]:
    counts = _simulated(name, list(_prompts(times, options)))
    num_came = sum(counts.came.values())
    return {
        "order": name,
        "times": times,
        "of_capacity": counts.busy_s / options.seconds,
        "ttft_ms": percentiles(counts.ttft, 1e3),
        "refused": counts.refused / num_came,
        "dropped": counts.dropped / num_came,
        "answered": {name: counts.answered[name] / counts.came[name] for name in CLASSES},
    }


def _prompts(times: float, options: argparse.Namespace) -> Iterator[Prompt]:
    rng = random.Random(options.seed)
    at = rng.expovariate(PER_S * times)
    while at < options.seconds:
        group = rng.choice(SHARES)
        tokens = rng.randrange(256, 2 * MEAN_TOKENS - 256)
        yield Prompt(at, tokens, group, at + options.share * CLASSES[group])
        at += rng.expovariate(PER_S * times)


def _simulated(name: str, prompts: list[Prompt]) -> Counts:
    counts, coming, waiting = Counts(), deque(prompts), list[Prompt]()
    free_at, pressure = 0.0, PoolPressure()
    while coming or waiting:
        while coming and (not waiting or coming[0].at <= free_at):
            prompt = coming.popleft()
            counts.came[prompt.group] += 1
            may_wait_s = prompt.start_by - prompt.at
            if name == "pressed":
                may_wait_s = min(may_wait_s, pressure.limit_s(prompt.at))
                prompt = replace(prompt, start_by=prompt.at + may_wait_s)
            if _lets_in(name, prompt, waiting, max(free_at, prompt.at)):
                waiting.append(prompt)
            else:
                counts.refused += 1
                pressure.refused(may_wait_s, prompt.at)
        late = [prompt for prompt in waiting if prompt.start_by < free_at]
        counts.dropped += len(late)
        waiting = [prompt for prompt in waiting if prompt.start_by >= free_at]
        if not waiting:
            continue
        first = min(waiting, key=ORDERS[name])
        waiting.remove(first)
        work_s = first.tokens * TOKEN_S
        free_at = max(free_at, first.at) + work_s
        counts.busy_s += work_s
        counts.answered[first.group] += 1
        counts.ttft.append(free_at - first.at)
    return counts


def _lets_in(name: str, newcomer: Prompt, waiting: list[Prompt], begins: float) -> bool:
    match name:
        case "newest":
            places = []
        case "fcfs":
            places = [QueueEntry(-math.inf, prompt.tokens) for prompt in waiting]
        case _:
            places = [QueueEntry(prompt.start_by, prompt.tokens) for prompt in waiting]
    place = QueueEntry(newcomer.start_by, newcomer.tokens)
    line = QueueModel()
    for number, each in enumerate(places):
        line.join(number, each)
    late, _ = line.late_s(place, begins=begins, unit_s=TOKEN_S)
    return late <= 0.0


if __name__ == "__main__":
    main()
