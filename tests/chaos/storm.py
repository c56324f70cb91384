"""A system of real processes under a checked load, while one fault after the other is injected."""

import asyncio
import contextlib
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

import grpc.aio
import msgspec

from cli.client import UnfinishedRestart
from cli.demo import DIRECTORY
from tests.attack.load import Load, Served
from tests.attack.verdict import of_answers, of_log
from tests.chaos.faults import COLLECTIVE_S, Round
from tests.chaos.keeper import Keeper
from tests.chaos.site import NUM_NODES, NUM_PROCESSES, Sample, Site
from tests.support.processes.cluster import Cluster

_NUM_CLIENTS = 4
_NUM_TOKENS = (12, 200)  # questions, and responses in flight during faults
_CALM_S = 5.0
_AFTER_S = 5.0  # effects of a round may be noticed this much later
_COUNTED = ("baton_migrations_total", "baton_requests_replayed_total")


class Passed(msgspec.Struct, frozen=True):
    """A round that has ended. Times are relative to the start."""

    at_s: float
    faults: list[str]
    names: list[str]  # of the faults, without numbers
    done_s: float  # end of the last fault, or its start if it is no freeze
    until_s: float  # the system was as before
    breaks: bool  # its faults may break connections

    def saw(self, at_s: float) -> bool:
        """Return whether an observation at that time may be an effect of this period."""
        return self.at_s <= at_s <= self.until_s + _AFTER_S


class Report(msgspec.Struct, frozen=True):
    """The results of one storm."""

    seed: int
    seconds: float
    num_right: int
    p50_s: float
    p99_s: float
    slowest_s: float
    calm_p99_s: float  # of the same load without attacks
    broken: list[str]  # when and why questions were repeated
    rounds: list[Passed]
    samples: list[Sample]
    counters: dict[str, float]  # the router's, of migrations and replays
    complaints: list[str]


async def storm(
    seed: int,
    plan: Iterable[Round],
    going: Callable[[], bool],
    directory: Path,
    num_clients: int = _NUM_CLIENTS,
    *,
    ranks: bool = False,
) -> Report:
    """Start a system, and run one round of the plan after the other while `going` is true.

    Args:
        directory: for logs.
        ranks: whether nodes have several ranks, see `rounds`.
    """
    several = (
        "--engine.parallel.tp=2",
        "--engine.threads=1",
        f"--engine.parallel.collective-s={COLLECTIVE_S}",
    )
    storm = _Storm(num_clients)
    end = ""
    try:
        async with Cluster(
            DIRECTORY,
            directory,
            path="tcp",
            num_prefill=NUM_NODES,
            num_decode=NUM_NODES,
            canary_tokens=4,
            prefill_flags=several if ranks else (),
            flags_of={f"decode-{NUM_NODES - 1}": several} if ranks else {},
            router_flags=(f"--processes={NUM_PROCESSES}", "--policy=round_robin"),
        ) as cluster:
            await storm.hold(cluster, seed, plan, going)
    except* (AssertionError, grpc.aio.AioRpcError, TimeoutError, UnfinishedRestart) as errors:
        end = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
    return storm.report(seed, end)


class _Storm:
    """One of them, from its start to its report."""

    def __init__(self, num_clients: int) -> None:
        self._num_clients = num_clients
        self._began = time.monotonic()
        self._calm, self._served = Served(), Served()
        self._passed: list[Passed] = []
        self._samples: list[Sample] = []
        self._counters: dict[str, float] = {}
        self._logs: dict[str, Path] = {}
        self._complaints: list[str] = []

    async def hold(
        self, cluster: Cluster, seed: int, plan: Iterable[Round], going: Callable[[], bool]
    ) -> None:
        """Raises errors of the system that end the run."""
        keeper = Keeper(cluster)
        site = Site(cluster, keeper)
        self._logs = keeper.logs
        load = Load(
            cluster.address,
            cluster.http_port,
            Random(seed),
            "",
            num_tokens=_NUM_TOKENS,
            asks_again=True,
        )
        async with load:
            await load.learn()
            self._calm = await load.ask_for(_CALM_S, self._num_clients)
            over = False
            asking = asyncio.ensure_future(load.ask_while(lambda: not over, self._num_clients))
            keeping = asyncio.ensure_future(keeper.run())
            rounds = asyncio.ensure_future(self._rounds(site, iter(plan), going))
            try:
                # If the keeper fails, nothing restarts nodes, so the run fails with its error at
                # once.
                ended, _ = await asyncio.wait({rounds, keeping}, return_when=FIRST_COMPLETED)
                for each in ended:
                    each.result()
            finally:
                over = True
                self._served = await asking
                for task in (rounds, keeping):
                    task.cancel()
                await asyncio.gather(rounds, keeping, return_exceptions=True)
                self._complaints += [*site.complaints, *keeper.complaints]

    async def _rounds(self, site: Site, plan: Iterator[Round], going: Callable[[], bool]) -> None:
        await site.until_well({})
        self._samples.append(site.sample(self._began))
        while going():
            each = next(plan)
            await asyncio.sleep(each.pause_s)
            before = await site.instances(each.faults)
            at_s = self._now()
            print(f"{at_s:6.1f} s: {', '.join(map(str, each.faults))}", flush=True)
            await asyncio.gather(*(site.befall(fault) for fault in each.faults))
            done_s = self._now()
            await site.until_well(before)
            self._passed.append(
                Passed(
                    at_s,
                    [str(fault) for fault in each.faults],
                    [fault.name for fault in each.faults],
                    done_s,
                    self._now(),
                    each.breaks,
                )
            )
            self._samples.append(site.sample(self._began))
            self._counters |= await site.counted(*_COUNTED)

    def report(self, seed: int, end: str) -> Report:
        """Args:
        end: an error that ended the run early, or occurred at the end of the system.
        """
        seconds = self._now()
        return Report(
            seed,
            seconds,
            self._served.num_right,
            self._served.percentile(50),
            self._served.percentile(99),
            max(self._served.seconds, default=0.0),
            self._calm.percentile(99),
            [f"{at - self._began:.1f} s: {what}" for at, what in self._served.broken],
            self._passed,
            self._samples,
            self._counters,
            [*self._complaints, *self._found(seconds), *([end] if end else [])],
        )

    def _found(self, seconds: float) -> Iterator[str]:
        """Yield the failures that responses and logs show."""
        yield from of_answers(self._served)
        for at, what in self._served.broken:
            at_s = at - self._began
            if not any(each.breaks and each.saw(at_s) for each in self._passed):
                yield f"at {at_s:.1f} s an answer broke though no router ended: {what}"
        for name, log in self._logs.items():
            with contextlib.suppress(FileNotFoundError):
                yield from of_log(name, log, seconds)

    def _now(self) -> float:
        """Return seconds since the start."""
        return time.monotonic() - self._began
