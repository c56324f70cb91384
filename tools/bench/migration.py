"""Measure the pause that clients see when responses migrate between decode nodes.

    python -m tools.bench.migration [--rounds 12] [--answers 4] [--prompt 512]

A router, a prefill node and two decode nodes run a tiny model on this machine's cores. While long
responses run, their decode node is drained. They continue at the other node, the drained one is
restarted, and the direction reverses. The pause of a response is its longest gap between two
messages after the call to drain. The same run also measures the gap of its undisturbed tokens (a
step), and a gRPC round trip to a node.

Goal: the p50 of the pause is at most 1.5 round trips, a step and 5 ms. No token may be recomputed.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.support.cluster import Cluster, Node, slowed
from tests.support.noise_model import write
from tools.bench.support import record

_GOAL_MORE_S = 0.005
_GOAL_ROUND_TRIPS = 1.5
_STEP_S = 0.01  # added to each forward, as for a larger model, so that responses outlast two starts
_CALM_S = 1.0  # of undisturbed responses, before each drain
_NUM_ROUND_TRIPS = 200


@dataclass(slots=True)
class _Answer:
    """One response as its client sees it."""

    moments: list[float] = field(default_factory=list)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the gaps between messages of which the second arrived in that time."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return [after - before for before, after in pairs if begin <= after < end]


@dataclass(frozen=True, slots=True)
class _Found:
    pauses: list[float]
    steps: list[float]
    round_trips: list[float]
    moved: float
    stayed: float
    replays: float


async def measure(rounds: int, num_answers: int, num_prompt: int) -> _Found:
    pauses: list[float] = []
    steps: list[float] = []
    with tempfile.TemporaryDirectory(prefix="baton-migration-") as directory:
        model = Path(directory) / "model"
        write(model)
        flags = ("--engine.cache.num-pages=2048",)
        async with Cluster(
            model,
            Path(directory),
            num_decode=2,
            decode_flags=flags,
            prefill_flags=flags,
            environment=slowed(_STEP_S),
        ) as cluster:
            for number in range(rounds):
                answers = [_Answer() for _ in range(num_answers)]
                source = cluster.decode[number % 2]
                await _one_round(cluster, source, answers, num_prompt, pauses, steps)
            round_trips = [await _round_trip(cluster.prefill[0]) for _ in range(_NUM_ROUND_TRIPS)]
            counted = [
                await cluster.metric("baton_moves_total", outcome="moved"),
                await cluster.metric("baton_moves_total", outcome="stayed"),
                await cluster.metric("baton_replays_total"),
            ]
    return _Found(pauses, steps, round_trips, *counted)


async def _one_round(
    cluster: Cluster,
    source: Node,
    answers: list[_Answer],
    num_prompt: int,
    pauses: list[float],
    steps: list[float],
) -> None:
    """Start all responses at `source`, then migrate them to the other node."""
    (target,) = [node for node in cluster.decode if node is not source]
    # A node that is not there when they begin cannot get any of them.
    await cluster.drain(target)
    draw = Random(len(pauses))
    prompts = [[draw.randrange(256) for _ in range(num_prompt)] for _ in answers]
    over = asyncio.Event()
    tasks = [
        asyncio.create_task(_ask(cluster, prompt, answer, over))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    await cluster.start_again(target)
    await cluster.wait_until(lambda: _usable(cluster, 2), "both decode nodes are usable")
    begin = time.monotonic()
    await asyncio.sleep(_CALM_S)  # the measured undisturbed phase
    drained = time.monotonic()
    for answer in answers:
        steps += answer.gaps(begin, drained)
    await cluster.drain(source)
    await asyncio.sleep(_CALM_S)
    end = time.monotonic()
    pauses += [max(answer.gaps(drained, end)) for answer in answers]
    over.set()
    await asyncio.gather(*tasks)
    await cluster.start_again(source)
    await cluster.wait_until(lambda: _usable(cluster, 2), "both decode nodes are usable")


async def _ask(cluster: Cluster, prompt: list[int], answer: _Answer, over: asyncio.Event) -> None:
    messages = cluster.stream(prompt, max_tokens=7000, ignore_eos=True)
    async with aclosing(messages) as responses:
        async for _ in responses:
            answer.moments.append(time.monotonic())
            if over.is_set():
                return
    raise AssertionError("an answer has ended before its move")


async def _usable(cluster: Cluster, number: int) -> bool:
    """Return whether `number` decode nodes are ready and paired."""
    nodes = [node for node in (await cluster.describe()).nodes if node.role == "decode"]
    return sum(node.state == "ready" and bool(node.links) for node in nodes) == number


async def _round_trip(node: Node) -> float:
    began = time.perf_counter()
    await node.describe()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--answers", type=int, default=4, help="that move at a time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    options = parser.parse_args()
    found = asyncio.run(measure(options.rounds, options.answers, options.prompt))
    step_s, round_trip_s = map(statistics.median, (found.steps, found.round_trips))
    goal_s = _GOAL_ROUND_TRIPS * round_trip_s + step_s + _GOAL_MORE_S
    rows: list[dict[str, Any]] = [
        {"what": what, **record.percentiles(values, 1e3)}
        for what, values in (
            ("pause of a move", found.pauses),
            ("gap of an undisturbed answer", found.steps),
            ("round trip", found.round_trips),
        )
    ]
    columns = {"": "{what}", "p50 ms": "{p50}", "p90 ms": "{p90}", "p99 ms": "{p99}"}
    record.table(rows, columns)
    within = statistics.median(found.pauses) <= goal_s
    record.say(
        f"goal {1e3 * goal_s:.1f} ms: {'met' if within else 'missed'}; {found.moved:g} moved, "
        f"{found.stayed:g} came to nothing, {found.replays:g} computed again"
    )
    record.emit(
        "migration",
        vars(options),
        rows,
        goal_ms=round(1e3 * goal_s, 2),
        moved=found.moved,
        stayed=found.stayed,
        replays=found.replays,
    )


if __name__ == "__main__":
    main()
