"""Compare the same nodes, colocated and disaggregated, under the same load."""

import argparse

from bench.commands.command import (
    Findings,
    add_common_options,
    check_context,
    numbers,
)
from bench.commands.compare_report import findings
from bench.commands.pair import (
    MAX_IN_FLIGHT,
    WARM_UP_SEED,
    ComparedPair,
    SystemsReady,
    add_pair_flags,
    seed_of,
)
from bench.session import Session
from bench.summary import Objectives, latencies
from bench.traffic.load import LoadGenerator, LoadRun, poisson, until
from bench.traffic.workload import HELP, Lengths, Workload
from cli.client import positive, ranged
from common.settings import add_options

SHARES = (0.3, 0.6, 0.9)  # of the colocated system's closed-loop throughput
STREAMS_PER_NODE = 8  # in the closed loop
OBJECTIVE_FACTOR = 3.0
PROMPTS, OUTPUT = "mix:128=0.85,2048=0.15", "64"
_ALONE_SEED, _FULL_SEED = WARM_UP_SEED + 1, WARM_UP_SEED + 2
_RATES = "Poisson arrivals a second (0.3, 0.6 and 0.9 of the colocated capacity)"


def add_flags(parser: argparse.ArgumentParser) -> None:
    lengths = Lengths.parse
    add_pair_flags(parser)
    add_options(
        parser,
        ("--rate", numbers(float), None, "R,R,...", _RATES),
        ("--duration", positive, 20.0, "S", "seconds of a run (20)"),
    )
    add_options(
        parser.add_argument_group("lengths", f"Lengths in tokens: {HELP}"),
        ("--prompt-tokens", lengths, lengths(PROMPTS), "LENGTH", f"prompt lengths ({PROMPTS})"),
        ("--output-tokens", lengths, lengths(OUTPUT), "LENGTH", f"output lengths ({OUTPUT})"),
        ("--long-tokens", ranged(int, 1), 1024, "N", "shortest prompt that counts as long (1024)"),
    )
    add_common_options(parser, "compare")


class CompareCommand:
    name = "compare"

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the options. Raises InvalidInput."""
        self._options = options
        self._work = Workload(
            options.prompt_tokens, options.output_tokens, long_tokens=options.long_tokens
        )
        self._pair = ComparedPair("baton bench compare", options)
        self._rates: list[float] = list(options.rate or ())
        self._capacity: float | None = None
        self.objectives = options.goodput or Objectives()

    async def measure(self, session: Session) -> None:
        async def block(ready: SystemsReady, repeats: list[int]) -> None:
            check_context(ready.context_tokens, self._work.largest)
            await self._pair.warm_up(session, ready, self._work, STREAMS_PER_NODE)
            if not self._rates or not session.objectives.limits:
                await self._calibrate(session, ready)
            for repeat in repeats:
                for number, rate in enumerate(self._rates):
                    await self._one(session, ready, repeat, number, rate)

        await self._pair.each(session, (self._pair.colocated, self._pair.disaggregated), block)

    def findings(self, session: Session) -> Findings:
        return findings(
            session,
            (self._pair.colocated, self._pair.disaggregated),
            rates=self._rates,
            capacity=self._capacity,
            objectives_given=self._options.goodput is not None,
        )

    async def _calibrate(self, session: Session, ready: SystemsReady) -> None:
        """Measure the colocated system's throughput and the latency of a single request.

        The derived rates and objectives apply to both systems.
        """
        alone = await self._closed_loop(session, ready, 1, _ALONE_SEED)
        if not session.objectives.limits:
            stats = latencies([o for o in alone.outcomes if not o.error])
            limits = {
                kind: OBJECTIVE_FACTOR * (stats[kind]["p99"] or 1.0) for kind in ("ttft", "itl")
            }
            session.objectives = Objectives(limits)
        if not self._rates:
            streams = STREAMS_PER_NODE * self._pair.num_nodes
            full = await self._closed_loop(session, ready, streams, _FULL_SEED)
            completed = sum(not outcome.error for outcome in full.outcomes)
            self._capacity = completed / max(full.wall_s, 1e-9)
            self._rates = [round(share * self._capacity, 3) for share in SHARES]

    async def _closed_loop(
        self, session: Session, ready: SystemsReady, streams: int, seed: int
    ) -> LoadRun:
        what = f"{ready.system.name}, {streams} streams to calibrate"
        jobs, last_s = self._work.jobs(seed), self._options.duration / 2
        return await session.rehearse(
            what, ready.client.ask, jobs, concurrency=streams, duration_s=last_s
        )

    async def _one(
        self, session: Session, ready: SystemsReady, repeat: int, number: int, rate: float
    ) -> None:
        seed = seed_of(self._options.seed, repeat, number)
        due = list(until(poisson(rate, seed), count=None, duration_s=self._options.duration))

        async def drive(load: LoadGenerator) -> None:
            await load.open_loop(self._work.jobs(seed), due, max_in_flight=MAX_IN_FLIGHT)

        await session.measure(
            ready.client.ask,
            drive,
            system=ready.system.name,
            point=f"{rate:g} requests/s",
            x=rate,
            repeat=repeat,
            total=len(due),
        )
