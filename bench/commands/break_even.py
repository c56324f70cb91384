"""Find the prompt length from which disaggregation pays."""

import argparse
import asyncio
from dataclasses import replace
from statistics import median

from bench.commands.break_even_answer import KNOB
from bench.commands.break_even_report import BreakEvenSetting, findings
from bench.commands.command import CommandInfo, Findings, add_common_flags, check_common_flags
from bench.commands.pair import (
    MAX_IN_FLIGHT,
    WARM_UP_SEED,
    ComparedPair,
    SystemsReady,
    add_pair_flags,
    check_context,
    seed_of,
    warm_up,
)
from bench.errors import InvalidInput, UnusableRun
from bench.objectives import Objectives
from bench.session import Session
from bench.traffic.lengths import Lengths
from bench.traffic.load import LoadGenerator, poisson, until
from bench.traffic.workload import Workload

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
LOCAL = "local"
MOST = 1 << 30  # more tokens than any prompt has
MIN_PROBES, MAX_RATE = 8, 20.0
_UNLOADED_PROBES = 3


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_pair_flags(parser, repeats=4)
    parser.add_argument(
        "--prompt-tokens",
        type=_lengths,
        metavar="N,N,...",
        help=f"prompt lengths of probes ({','.join(map(str, LENGTHS))}, up to the context length)",
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=8.0,
        metavar="S",
        help=f"seconds of a run, extended until {MIN_PROBES} probes are done (8)",
    )
    parser.add_argument(
        "--load",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="share of the time of all nodes for the prefill of probes (0.25)",
    )
    parser.add_argument(
        "--streams",
        type=int,
        default=8,
        metavar="N",
        help="number of requests that generate meanwhile (8)",
    )
    parser.add_argument(
        "--stream-prompt-tokens",
        type=int,
        default=32,
        metavar="N",
        help="prompt tokens of each (32)",
    )
    parser.add_argument(
        "--stream-output-tokens",
        type=int,
        default=64,
        metavar="N",
        help="output tokens of each (64)",
    )
    parser.add_argument(
        "--probe-output-tokens",
        type=int,
        default=4,
        metavar="N",
        help="output tokens of a probe (4)",
    )
    add_common_flags(parser, "break-even")


class BreakEvenCommand:
    name = "break-even"

    def __init__(self, options: argparse.Namespace, node_flags: list[str]) -> None:
        """Check the options. Raises InvalidInput."""
        check_common_flags(options)
        for name in ("streams", "stream_prompt_tokens", "stream_output_tokens", "duration"):
            if not getattr(options, name) > 0:
                raise InvalidInput(f"--{name.replace('_', '-')} must be above 0")
        if not (0 < options.load < 1 and options.probe_output_tokens > 0):
            raise InvalidInput("--load is between 0 and 1, --probe-output-tokens above 0")
        if KNOB in options.disaggregated_flags or KNOB in options.colocated_flags:
            raise InvalidInput(f"{KNOB} is what this command is to find; it sets it itself")
        self._options = options
        pair = self._pair = ComparedPair("baton bench break-even", options, node_flags)
        remote, own = pair.disaggregated, pair.disaggregated.decode_flags
        self._remote = replace(remote, decode_flags=(*own, f"{KNOB}=0"))
        self._local = replace(remote, name=LOCAL, decode_flags=(*own, f"{KNOB}={MOST}"))
        self._lengths: list[int] = []
        self._rates: dict[int, float] = {}  # of probes, by their length
        self._others = Workload(
            Lengths.fixed(options.stream_prompt_tokens),
            Lengths.fixed(options.stream_output_tokens),
            group="background",
        )
        self.objectives = options.goodput or Objectives()

    async def measure(self, session: Session) -> None:
        async def block(ready: SystemsReady, repeats: list[int]) -> None:
            self._choose_lengths(ready)
            check_context(ready, max(self._others.largest, self._probes(self._lengths[-1]).largest))
            await warm_up(session, ready, self._others, self._options.streams)
            if not self._rates:
                await self._calibrate(session, ready)
            for repeat in repeats:
                for length in (0, *self._lengths):
                    await self._one(session, ready, repeat, length)

        await self._pair.each(session, (self._pair.colocated, self._remote, self._local), block)

    def findings(self, session: Session, about: CommandInfo) -> Findings:
        setting = BreakEvenSetting(
            colocated=self._pair.colocated,
            remote=self._remote,
            local=self._local,
            lengths=tuple(self._lengths),
            rates=dict(self._rates),
            shared_cores=self._pair.shared_cores,
        )
        return findings(session, about, setting)

    def _choose_lengths(self, ready: SystemsReady) -> None:
        if self._lengths:
            return
        if self._options.prompt_tokens:
            self._lengths = self._options.prompt_tokens
            return
        most = (ready.context_tokens or MOST) - self._options.probe_output_tokens
        self._lengths = [length for length in LENGTHS if length <= most]
        if not self._lengths:
            raise InvalidInput(f"the model takes {ready.context_tokens} tokens: too few to sweep")

    def _probes(self, length: int) -> Workload:
        output = Lengths.fixed(self._options.probe_output_tokens)
        return Workload(Lengths.fixed(length), output, group="probe")

    async def _calibrate(self, session: Session, ready: SystemsReady) -> None:
        """Set the rate of probes for each length.

        At that rate, their prefills take the share --load of all nodes' time, measured on the
        otherwise idle first system. Every system then receives the same probes at the same times.
        """
        with session.show.doing(f"{ready.arm.name}, to calibrate", len(self._lengths)) as tick:
            for length in self._lengths:
                load = LoadGenerator(ready.client.ask)
                jobs = self._probes(length).jobs(WARM_UP_SEED + length)
                async with load.measuring():
                    await load.closed_loop(jobs, concurrency=1, requests=_UNLOADED_PROBES)
                took = [o.ttft for o in load.run.outcomes if o.ttft is not None and not o.error]
                if not took:
                    raise UnusableRun(f"no prompt of {length} tokens was answered")
                rate = self._options.load * self._pair.num_nodes / max(median(took), 1e-6)
                self._rates[length] = min(MAX_RATE, round(rate, 4))
                tick()

    async def _one(self, session: Session, ready: SystemsReady, repeat: int, length: int) -> None:
        options = self._options
        seed = seed_of(options.seed, repeat, length)
        due: list[float] = []
        if length:
            rate = self._rates[length]
            count = max(MIN_PROBES, round(rate * options.duration))
            due = list(until(poisson(rate, seed), count=count, duration_s=None))

        async def drive(load: LoadGenerator) -> None:
            over = asyncio.Event()
            async with asyncio.TaskGroup() as both:
                both.create_task(
                    load.closed_loop(
                        self._others.jobs(seed + 500_000),
                        concurrency=options.streams,
                        ends=over.is_set,
                        duration_s=None if length else options.duration / 2,
                    )
                )
                if length:
                    jobs = self._probes(length).jobs(seed)
                    await load.open_loop(jobs, due, max_in_flight=MAX_IN_FLIGHT)
                    over.set()

        await session.measure(
            ready.client.ask,
            drive,
            system=ready.arm.name,
            point=f"probes of {length} tokens" if length else "no probes",
            x=float(length),
            repeat=repeat,
        )


def _lengths(text: str) -> list[int]:
    lengths = [int(part) for part in text.split(",")]
    if lengths != sorted(set(lengths)) or not 0 < lengths[0] <= lengths[-1] < MOST:
        raise InvalidInput("lengths are above 0 and go upwards")
    return lengths
