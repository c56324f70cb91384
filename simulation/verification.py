"""Verification of a plan: the highest rate of layouts in virtual time, beside the closed forms.

A run sends requests with the lengths of the load to the whole cluster at one rate. The first run
has the rate of the closed form. Further runs go up or down from there, until the highest rate
within the limits is found.
"""

import math
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from simulation.plan.layouts import DEFAULT_ROWS
from simulation.plan.search import Candidate, Hardware, Plan, ties
from simulation.plan.traffic import PERCENTILE, LatencyTargets, TraceLine, Traffic
from simulation.virtual.process import command, environment
from simulation.virtual.scenario import MAX_NODES

_STEP = 1.12  # factor between the rates of two runs
_MOST_RUNS = 5  # runs of one layout
_LEAST_COUNTED = 150  # requests that count in a run
_SEED = 1


class Run(msgspec.Struct, frozen=True):
    """A run in virtual time.

    Attributes:
        rate: requests/s.
        ttft, tpot: 90th percentiles in seconds. None: no request was completed.
        failed: share of failed requests.
    """

    rate: float
    ttft: float | None
    tpot: float | None
    failed: float

    def use(self, targets: LatencyTargets) -> float:
        """Return the larger ratio of a latency to its limit. At most 1: within both limits."""
        if self.ttft is None or self.failed > 1 - PERCENTILE:
            return math.inf
        return max(self.ttft / targets.ttft, (self.tpot or 0.0) / targets.tpot)


class Verified(msgspec.Struct, frozen=True):
    """A layout in virtual time.

    Attributes:
        capacity: highest rate within the targets, in requests/s. 0: no run was within them.
            None: the time ended before it was found.
        runs: runs in order of their rate.
        tie: the lead of the best layout is within the error of the cost model.
    """

    candidate: Candidate
    capacity: float | None
    runs: tuple[Run, ...]
    tie: bool = False

    def highest_within(self, targets: LatencyTargets) -> Run | None:
        """Return the run with the highest rate within the targets."""
        within = [each for each in self.runs if each.use(targets) <= 1]
        return within[-1] if within else None


class Verification(msgspec.Struct, frozen=True):
    """Layouts in virtual time, best first. Layouts whose time ended come last."""

    layouts: tuple[Verified, ...]
    band: float

    @property
    def verdict(self) -> str:
        """Return sentences on the best layouts, and on the better kind of nodes."""
        best = [each for each in self.layouts if each.tie] or list(self.layouts[:1])
        if not best or not best[0].capacity:
            return "In virtual time, no layout was found to meet the objectives."
        names = "; ".join(each.candidate.layout.name for each in best)
        found = f"is best: {names}" if len(best) == 1 else f"tie within {self.band:.0%}: {names}"
        kinds = {bool(each.candidate.layout.prefill) for each in best}
        if len(kinds) == 2:
            return f"In virtual time, these {found}."
        kind = "Disaggregated" if kinds.pop() else "Colocated"
        these = "this" if len(best) == 1 else "these"
        return f"In virtual time, {these} {found}. {kind} nodes are better."


def verify(
    plan: Plan,
    hardware: Hardware,
    traffic: Traffic,
    targets: LatencyTargets,
    *,
    count: int,
    limit_s: float,
) -> Verification:
    """Run the best layouts of a plan in virtual time, one process per processor core.

    Args:
        count: number of layouts. The best of each kind are always included.
        limit_s: seconds after which runs are ended.

    Raises:
        ValueError: a run failed.
    """
    deadline = time.monotonic() + limit_s
    chosen = [
        each
        for each in plan.leaders(count)
        if each.capacity and max(each.layout.prefill, each.layout.decode) <= MAX_NODES
    ]
    with (
        tempfile.TemporaryDirectory(prefix="baton-plan-") as directory,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        tests = [
            _LayoutTest(hardware, traffic, targets, each, Path(directory) / str(number))
            for number, each in enumerate(chosen)
        ]
        found = list(pool.map(lambda test: test.verified(deadline), tests))
    return Verification(_ranked(found, plan.band), plan.band)


def _ranked(found: Sequence[Verified], band: float) -> tuple[Verified, ...]:
    ranked = sorted(found, key=lambda each: -1.0 if each.capacity is None else each.capacity)
    ranked.reverse()
    marks = ties([each.capacity for each in ranked], band)
    return tuple(
        msgspec.structs.replace(each, tie=tie) for each, tie in zip(ranked, marks, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _LayoutTest:
    """The runs of one layout. `directory`: a new directory for its files."""

    hardware: Hardware
    traffic: Traffic
    targets: LatencyTargets
    candidate: Candidate
    directory: Path

    def verified(self, deadline: float) -> Verified:
        """Search for the highest rate until `deadline`, in time.monotonic()."""
        self.directory.mkdir()
        runs: list[Run] = []
        try:
            for rate in self._rates(runs):
                runs.append(self._run(rate, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            capacity = None
        else:
            capacity = self._capacity(runs)
        runs.sort(key=lambda each: each.rate)
        return Verified(self.candidate, capacity, tuple(runs))

    def _rates(self, runs: Sequence[Run]) -> Iterator[float]:
        """Yield the rate of the next run, which the caller appends to `runs`.

        Ends when one of the last two runs is within the limits and the other is not.
        """
        rate = self.candidate.capacity
        yield rate
        goes_up = self._within(runs[0])
        while len(runs) < _MOST_RUNS and self._within(runs[-1]) is goes_up:
            rate *= _STEP if goes_up else 1 / _STEP
            yield rate

    def _within(self, run: Run) -> bool:
        return run.use(self.targets) <= 1

    def _capacity(self, runs: Sequence[Run]) -> float:
        """Return the rate at which the limits are reached, interpolated between two runs."""
        within = [each for each in runs if self._within(each)]
        beyond = [each for each in runs if not self._within(each)]
        if not within:
            return 0.0
        low = max(within, key=lambda each: each.rate)
        if not beyond:
            return low.rate
        high = min(beyond, key=lambda each: each.rate)
        below, above = low.use(self.targets), high.use(self.targets)
        return low.rate + (high.rate - low.rate) * (1 - below) / (above - below)

    def _run(self, rate: float, left_s: float) -> Run:
        """Run the layout at one rate. Raises TimeoutExpired, or ValueError if the run failed."""
        file = self.directory / "sim.yaml"
        file.write_bytes(msgspec.json.encode(self._scenario(rate)))
        done = subprocess.run(
            command(str(file)),
            # A run that is ended leaves its temporary files there.
            env={**environment(), "TMPDIR": str(self.directory)},
            capture_output=True,
            text=True,
            timeout=max(left_s, 0.0),
        )
        if done.returncode:
            broken = msgspec.json.decode(done.stdout)["violations"] if done.stdout else []
            reason = "; ".join(broken) or done.stderr.strip()
            raise ValueError(f"{self.candidate.layout.name} in virtual time: {reason}")
        report = msgspec.json.decode(done.stdout)
        failed = 1 - (report["right"] + report["wrong"]) / report["requests"]
        return Run(rate, report["ttft"]["p90"], report["tpot"]["p90"], failed)

    def _scenario(self, rate: float) -> dict[str, Any]:
        """Return the scenario file of a run.

        The first requests fill the cluster, and the last ones keep it full. Each group has as many
        requests as run at the same time, by Little's law.
        """
        layout, slots = self.candidate.layout, self.candidate.slots
        running = math.ceil(slots * layout.decode)
        counted = max(_LEAST_COUNTED, running // 2)
        trace = self.directory / "trace.jsonl"
        trace.write_bytes(b"\n".join(self._trace(rate, 2 * running + counted)))
        options: dict[str, Any] = {}
        if layout.chunk:
            options["engine.scheduler.chunked_prefill_tokens"] = layout.chunk
        if slots > DEFAULT_ROWS:
            options["engine.scheduler.max_running_requests"] = round(slots)
        nodes = {"prefill": layout.prefill, "decode": layout.decode}
        return {
            "cluster": {
                "gpu": self.hardware.gpu,
                "model": self.hardware.model,
                **({"colocated": layout.decode} if layout.chunk else nodes),
                "prefill_tp": 1 if layout.chunk else layout.prefill_tp,
                "decode_tp": layout.decode_tp,
                "path": self.hardware.path,
                "options": options,
            },
            "load": {"trace": str(trace), "warm_up": running, "cool_down": running},
        }

    def _trace(self, rate: float, requests: int) -> Iterator[bytes]:
        """Yield trace lines with Poisson arrivals. The lengths are the same for all rates."""
        rng, at = random.Random(_SEED), 0.0
        for _ in range(requests):
            at += rng.expovariate(rate)
            lengths = rng.choice(self.traffic.requests)
            yield msgspec.json.encode(TraceLine(lengths.input, lengths.output, 1e3 * at))
