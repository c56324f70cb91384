"""Find the prompt length from which disaggregation pays."""

import argparse
import asyncio
from dataclasses import replace
from statistics import median

from bench.commands.break_even_report import FLAG, LOCAL, findings
from bench.commands.command import (
    Findings,
    add_common_options,
    check_context,
    numbers,
)
from bench.commands.pair import (
    MAX_IN_FLIGHT,
    WARM_UP_SEED,
    ComparedPair,
    SystemsReady,
    add_pair_flags,
    seed_of,
)
from bench.errors import InvalidInput, UnusableRun
from bench.session import Session
from bench.summary import Objectives
from bench.traffic.load import LoadGenerator, poisson, until
from bench.traffic.workload import Lengths, Workload
from cli.client import positive, ranged
from common.settings import add_options

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
MOST = 1 << 30  # longer than any prompt
MIN_PROBES, MAX_RATE = 8, 20.0
_UNLOADED_PROBES = 3


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise InvalidInput(f"{text} is invalid: expected a number between 0 and 1")
    return number


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_pair_flags(parser)
    lengths = f"prompt lengths of probes ({','.join(map(str, LENGTHS))}, up to the context length)"
    count = ranged(int, 1)
    add_options(
        parser,
        ("--prompt-tokens", numbers(int, MOST), None, "N,N,...", lengths),
        ("--duration", positive, 8.0, "S", f"seconds of {MIN_PROBES} or more probes (8)"),
        ("--load", _share, 0.25, "SHARE", "share of the nodes' time for prefill of probes (0.25)"),
        ("--streams", count, 8, "N", "other streams that generate meanwhile (8)"),
        ("--stream-prompt-tokens", count, 32, "N", "prompt length of other streams (32)"),
        ("--stream-output-tokens", count, 64, "N", "response length of other streams (64)"),
        ("--probe-output-tokens", count, 4, "N", "response length of a probe (4)"),
    )
    add_common_options(parser, "break-even")


class BreakEvenCommand:
    name = "break-even"

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the options. Raises InvalidInput."""
        if FLAG in options.disaggregated_flags or FLAG in options.colocated_flags:
            raise InvalidInput(f"{FLAG} cannot be set: this command finds its value")
        self._options = options
        pair = self._pair = ComparedPair("baton bench break-even", options)
        remote, own = pair.disaggregated, pair.disaggregated.decode_flags
        self._remote = replace(remote, decode_flags=(*own, f"{FLAG}=0"))
        self._local = replace(remote, name=LOCAL, decode_flags=(*own, f"{FLAG}={MOST}"))
        self._lengths: list[int] = options.prompt_tokens or []
        self._rates: dict[int, float] = {}  # rate of probes by their length
        self._others = Workload(
            Lengths.fixed(options.stream_prompt_tokens),
            Lengths.fixed(options.stream_output_tokens),
            group="background",
        )
        self.objectives = options.goodput or Objectives()

    async def measure(self, session: Session) -> None:
        async def block(ready: SystemsReady, repeats: list[int]) -> None:
            self._lengths = self._lengths or self._default_lengths(ready)
            longest = max(self._others.largest, self._probes(self._lengths[-1]).largest)
            check_context(ready.context_tokens, longest)
            await self._pair.warm_up(session, ready, self._others, self._options.streams)
            if not self._rates:
                await self._calibrate(session, ready)
            for repeat in repeats:
                for length in (0, *self._lengths):
                    await self._one(session, ready, repeat, length)

        await self._pair.each(session, (self._pair.colocated, self._remote, self._local), block)

    def findings(self, session: Session) -> Findings:
        return findings(
            session,
            (self._pair.colocated, self._remote, self._local),
            lengths=self._lengths,
            rates=self._rates,
            shared_cores=self._pair.shared_cores,
        )

    def _default_lengths(self, ready: SystemsReady) -> list[int]:
        most = (ready.context_tokens or MOST) - self._options.probe_output_tokens
        if most < LENGTHS[0]:
            raise InvalidInput(f"a context of {ready.context_tokens} tokens is too small to sweep")
        return [length for length in LENGTHS if length <= most]

    def _probes(self, length: int) -> Workload:
        output = Lengths.fixed(self._options.probe_output_tokens)
        return Workload(Lengths.fixed(length), output, group="probe")

    async def _calibrate(self, session: Session, ready: SystemsReady) -> None:
        """Set the rate of probes for each length.

        At that rate, their prefills take the share --load of all nodes' time, as measured on the
        otherwise idle first system. Every system then receives the same probes at the same times.
        """
        for length in self._lengths:
            what = f"{ready.system.name}, probes of {length} tokens to calibrate"
            jobs = self._probes(length).jobs(WARM_UP_SEED + length)
            run = await session.rehearse(
                what, ready.client.ask, jobs, concurrency=1, requests=_UNLOADED_PROBES
            )
            ttfts = [o.ttft for o in run.outcomes if o.ttft is not None and not o.error]
            if not ttfts:
                raise UnusableRun(f"no prompt of {length} tokens was completed")
            rate = self._options.load * self._pair.num_nodes / max(median(ttfts), 1e-6)
            self._rates[length] = min(MAX_RATE, round(rate, 4))

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
            system=ready.system.name,
            point=f"probes of {length} tokens" if length else "no probes",
            x=float(length),
            repeat=repeat,
        )
