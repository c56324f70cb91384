"""Measure the gain of a planner when a load changes from long prompts to long responses.

    python -m tools.bench.planner [--seconds 50] [--step-ms 20] [--rates 14,9.5]

One system of four nodes is used, whose nodes change roles between the measurements. The first load
has long prompts and short responses, the second one the reverse. Each split into prefill and decode
nodes gets the same arrivals, first those of the one kind, then those of the other. A system with a
planner, which starts with two nodes of each role, gets them too. A response counts if it is
complete within its budget: --first-s, and two steps for each of its tokens. Clients wait no longer
than that.

Every forward takes --step-ms longer without computing, so that four nodes on two cores have the
capacity of four machines. A prefill node computes --chunk tokens in a step. A decode node computes
one token of each of --running responses.
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio

from cli.operating.fleet import Fleet
from cli.planner.__main__ import Planner
from cli.planner.decide import PlannerRules, ShiftCapacityAction, SwitchRoleAction
from cli.planner.metrics import PlannerMetrics
from cli.planner.pressure import PressureThresholds
from common.identity.secret import operator_keys
from protos.router_pb2 import GenerateRequest, TokenIds
from protos.sampling_pb2 import Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, slowed
from tools.bench.support import record

SPLITS = (1, 2, 3)  # prefill nodes of four
STEPS_PER_TOKEN = 2.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request."""

    name: str
    prompt: int  # tokens
    answer: int
    per_s: float


@dataclass(slots=True)
class Counted:
    sent: int = 0
    good: int = 0


def arrivals(kind: Kind, seconds: float, seed: int) -> Iterator[tuple[float, list[int]]]:
    """Yield the time and prompt of each arrival, determined by the seed."""
    draw, at = Random(seed), 0.0
    while (at := at + draw.expovariate(kind.per_s)) < seconds:
        yield at, [draw.randrange(2, 250) for _ in range(kind.prompt)]


async def load(cluster: Cluster, kind: Kind, options: argparse.Namespace) -> Counted:
    """Send the arrivals of a kind, regardless of the responses."""
    counted, began = Counted(), time.perf_counter()
    budget_s = options.first_s + STEPS_PER_TOKEN * options.step_ms / 1e3 * kind.answer

    async def ask(prompt: list[int]) -> None:
        request = GenerateRequest(
            token_ids=TokenIds(ids=prompt),
            sampling=Sampling(max_tokens=kind.answer, temperature=0.0, ignore_eos=True),
            timeout_s=budget_s,
        )
        num_tokens = 0
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in cluster.ask(request, timeout_s=budget_s):
                num_tokens += len(message.token_ids)
            counted.good += num_tokens == kind.answer

    async with asyncio.TaskGroup() as tasks:
        for at, prompt in arrivals(kind, options.seconds, options.seed):
            await asyncio.sleep(began + at - time.perf_counter())
            counted.sent += 1
            tasks.create_task(ask(prompt))
    return counted


@contextlib.asynccontextmanager
async def planned(cluster: Cluster, options: argparse.Namespace) -> AsyncIterator[list[str]]:
    """Run an active planner in the context. Yields the list of its decisions."""
    rules = PlannerRules(
        limits=PressureThresholds(queued_s=options.first_s / 2, running=options.running),
        sustained_s=3.0,
        settle_s=4.0,
        idle_s=600.0,
    )
    assert cluster.operator is not None
    key = operator_keys(cluster.operator.keyrings.current())[0]
    fleet = Fleet((("authorization", f"Bearer {key}"),), None, cluster.operator)
    planner = Planner(fleet, PlannerMetrics(), rules, router=cluster.address, act=True)
    made: list[str] = []
    began = time.perf_counter()

    async def run() -> None:
        while True:
            decision = await planner.look()
            match decision:
                case SwitchRoleAction(role=role):
                    made.append(f"{time.perf_counter() - began:.0f} s {role}")
                case ShiftCapacityAction():
                    made.append(f"{time.perf_counter() - began:.0f} s move")
            await asyncio.sleep(0.5)

    task = asyncio.create_task(run())
    try:
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def split(cluster: Cluster, num_prefill: int) -> None:
    """Give `num_prefill` nodes the prefill role, and all others the decode role."""
    while len(cluster.prefill) != num_prefill:
        grows = len(cluster.prefill) < num_prefill
        node = (cluster.decode if grows else cluster.prefill)[-1]
        await cluster.switch(node, "prefill" if grows else "decode")


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    prompts, answers = (float(rate) for rate in options.rates.split(","))
    kinds = [Kind("prompts", 8 * options.chunk, 8, prompts), Kind("answers", 32, 96, answers)]
    flags = (
        "--engine.cache.num-pages=1024",
        "--engine.threads=1",
        f"--engine.scheduler.max-running={options.running}",
        f"--engine.scheduler.chunk-tokens={options.chunk}",
        "--no-engine.cache.prefix-cache",
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="baton-planner-") as directory:
        model = make_checkpoint(Path(directory) / "model")
        how: dict[str, Any] = {"num_prefill": 2, "num_decode": 2, "node_flags": flags}
        environment = slowed(options.step_ms / 1e3)
        async with Cluster(model, Path(directory), environment=environment, **how) as cluster:
            for kind in kinds:  # nodes measure the time of a token
                short = argparse.Namespace(**{**vars(options), "seconds": 5.0})
                await load(cluster, kind, short)
            for num_prefill in SPLITS:
                await split(cluster, num_prefill)
                told = [await load(cluster, kind, options) for kind in kinds]
                rows.append(_row(f"{num_prefill} + {4 - num_prefill}", told, options))
            await split(cluster, 2)
            async with planned(cluster, options) as made:
                told = [await load(cluster, kind, options) for kind in kinds]
            rows.append(_row("planner", told, options, changes="; ".join(made)))
            # The cluster must know all changed nodes before it checks whether they have paired.
            nodes = [(node, (await node.describe()).role) for node in cluster.nodes]
            cluster.prefill = [node for node, role in nodes if role == "prefill"]
            cluster.decode = [node for node, role in nodes if role == "decode"]
    return rows


def _row(
    system: str, told: list[Counted], options: argparse.Namespace, changes: str = ""
) -> dict[str, Any]:
    good = [each.good / options.seconds for each in told]
    shares = [each.good / each.sent for each in told]
    whole = sum(each.good for each in told) / sum(each.sent for each in told)
    return {
        "system": system,
        "prompts_per_s": round(good[0], 2),
        "answers_per_s": round(good[1], 2),
        "prompts_share": round(shares[0], 3),
        "answers_share": round(shares[1], 3),
        "share": round(whole, 3),
        "changes": changes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=50.0, help="of each kind of load")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rates", default="14,9.5", help="requests per second of either kind")
    parser.add_argument("--chunk", type=int, default=64, help="prompt tokens of a step")
    parser.add_argument("--running", type=int, default=8, help="answers of a decode node at once")
    parser.add_argument("--first-s", type=float, default=1.5, help="budget until the first token")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    columns = {
        "prefill + decode": "{system}",
        "of prompts, in time/s": "{prompts_per_s:.1f}",
        "share": "{prompts_share:.0%}",
        "of answers, in time/s": "{answers_per_s:.1f}",
        "share ": "{answers_share:.0%}",
        "of all": "{share:.0%}",
        "changes": "{changes}",
    }
    record.table(rows, columns)
    best = max(row["share"] for row in rows[:-1])
    record.say(f"planner / best fixed split: {rows[-1]['share'] / best:.2f}")
    record.emit("planner", vars(options), rows, of_best=round(rows[-1]["share"] / best, 3))


if __name__ == "__main__":
    main()
