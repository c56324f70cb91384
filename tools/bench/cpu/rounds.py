"""Rounds of tools/bench/cpu: systems that run at the same time get the same prompts in turns."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from bench.traffic.workload import WorkloadRequest
from tools.bench.cpu.contenders import Contender, LeftOut
from tools.bench.cpu.figures import Better, Figure, Table
from tools.bench.cpu.floor import Floor
from tools.bench.support.load import make_jobs
from tools.bench.support.record import say

Systems = Mapping[str, Callable[[], AbstractAsyncContextManager[Contender]]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """One load: `streams` callers, each with one request in flight, until all requests are done."""

    name: str
    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    num_prefixes: int = 0  # number of distinct prompt prefixes. 0: no two prompts share one
    own_tokens: int = 0  # tokens of a prompt after its prefix

    def jobs(self, vocabulary: int, seed: int) -> list[WorkloadRequest]:
        """Return the jobs, determined by the seed. The prefixes do not depend on the seed."""
        own = self._random(self.requests, self.own_tokens or self.prompt_tokens, vocabulary, seed)
        prefixes = self.prefixes(vocabulary) or [WorkloadRequest((), 0)]
        return [
            WorkloadRequest(
                (*prefixes[number % len(prefixes)].prompt, *job.prompt), self.output_tokens
            )
            for number, job in enumerate(own)
        ]

    def prefixes(self, vocabulary: int) -> list[WorkloadRequest]:
        """Return requests that put every prefix into a prefix cache."""
        tokens = self.prompt_tokens - self.own_tokens
        return self._random(self.num_prefixes, tokens, vocabulary, seed=0)

    def _random(self, count: int, tokens: int, vocabulary: int, seed: int) -> list[WorkloadRequest]:
        return make_jobs(
            count, prompt_tokens=tokens, output_tokens=1, vocabulary=vocabulary, seed=seed
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one part of the benchmark."""

    table: Table
    floors: Sequence[Floor]  # measured before each round
    left_out: Mapping[str, str]  # reasons by system

    @property
    def floor(self) -> Floor:
        """Return the best floor of all rounds: the machine's limit without other load."""
        return Floor(
            max(floor.read_bytes_per_s for floor in self.floors),
            max(floor.product_flops_per_s for floor in self.floors),
        )

    def figure(
        self,
        what: str,
        values: Sequence[float],
        better: Better,
        goal: float | None = None,
        *,
        of: Sequence[str] = (),
    ) -> Figure:
        """Return a figure of this part.

        Args:
            of: systems that the values belong to. Systems that were left out are noted.
        """
        reasons = [f"{name}: {self.left_out[name]}" for name in of if name in self.left_out]
        return Figure(what, values, better, goal, "; ".join(reasons))


async def measured(
    systems: Systems,
    traffics: Sequence[Traffic],
    *,
    vocabulary: int,
    rounds: int,
    seed: int,
    floor: Callable[[], Floor],
) -> Measured:
    """Measure every system with every traffic in every round, forwards and backwards in turn.

    Raises:
        RuntimeError: a running system fails.
    """
    table, floors, left_out = Table(), list[Floor](), dict[str, str]()
    async with contextlib.AsyncExitStack() as stack:
        up: dict[str, Contender] = {}
        for name, make in systems.items():
            say(f"  {name} ...")
            try:
                up[name] = await stack.enter_async_context(make())
            except LeftOut as reason:
                left_out[name] = str(reason)
                say(f"  {name} is left out: {reason}")
        for place, traffic in enumerate(traffics):
            jobs = traffic.jobs(vocabulary, _seed(seed, 0, place))
            for contender in up.values():
                if traffic.num_prefixes:
                    await contender.answers(traffic.prefixes(vocabulary), 1)
                await contender.warm_up(jobs, traffic.streams)
        for number in range(1, rounds + 1):
            say(f"  round {number} of {rounds}")
            floors.append(floor())
            order = list(up) if number % 2 else list(up)[::-1]
            for place, traffic in enumerate(traffics):
                jobs = traffic.jobs(vocabulary, _seed(seed, number, place))
                for name in order:
                    row = await up[name].answers(jobs, traffic.streams)
                    table.rows.append(_row(name, traffic, number, row))
                    say(
                        f"    {name}, {traffic.name}: {row['tokens_per_s']:.1f} tokens/s, first "
                        f"{row['ttft_ms']['p50']:.0f} ms, gap {row['itl_ms']['p50']:.1f} ms"
                    )
    return Measured(table, floors, left_out)


def _seed(seed: int, number: int, place: int) -> int:
    """Return the seed of a traffic's prompts in a round. Never 0, the seed of the prefixes."""
    return 1 + 100_000 * seed + 100 * number + place


def _row(name: str, traffic: Traffic, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "system": name, "load": traffic.name, "round": number}
