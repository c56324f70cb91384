"""Measure the effect of local prefills at a decode node on its running responses.

    python -m tools.bench.local_prefill [--prompts 30] [--tokens 900] [--running 4]
    [--chunks 2048,256,64]

Some responses run when many prompts arrive at once. For the responses, the bench measures the time
between tokens until the last prompt has its first token. For the prompts, it measures the time
until that token. There are three ways to share the steps: prefill first, then decode; a quota,
which gives every other forward to decoding requests; mixed, where decoding requests are part of the
prompts' forwards.

One engine runs in this process on a CPU, with a model as large as the demo model. Time is the CPU
time of this process, so that other processes on the machine hardly count. All ways are measured in
one run, in turns, and compared within it.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.config import CacheConfig, EngineConfig, SchedulerConfig
from common.request import RequestSpec
from common.requests.sampling import SamplingParams
from engine.batch.batch import BatchResult, ForwardMode, LaunchedBatch, ScheduleBatch
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.build import Engine, build
from engine.loop.loop import EventLoop
from engine.scheduler.admission import ExtendRow
from engine.scheduler.next_rows import RowSelector
from engine.scheduler.scheduler import Scheduler
from tests.support.checkpoints import VOCABULARY_SIZE, make_checkpoint
from tools.bench.support import record
from tools.bench.support.models import TINY

PAGE_SIZE = 16
RUNNING_TOKENS = 64  # prompt tokens of the running responses
ANSWER_TOKENS = 8  # output tokens of the arriving prompts
WAYS = ("prefill first", "quota", "mixed")


class _WithQuota(RowSelector):
    """A selection of rows in which a forward without prompts follows each one with prompts.

    Applies only while a request decodes.
    """

    _prefilled = False

    def _extends(self, *, suspect: bool) -> list[ExtendRow]:
        if self._prefilled and len(self._running.ready()):
            self._prefilled = False
            return []
        rows = super()._extends(suspect=suspect)
        self._prefilled = bool(rows)
        return rows


@dataclass(eq=False)
class _Role:
    """A role that records when each request gets a token."""

    scheduler: Scheduler
    told: dict[int, list[float]] = field(default_factory=dict)  # by request
    last_first: float = 0.0  # when the last request got its first token

    def poll(self) -> None:
        pass

    def next_batch(self) -> ScheduleBatch | None:
        return self.scheduler.next_batch()

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        now = time.process_time()
        for request in self.scheduler.finish(batch, result).requests.tolist():
            if request not in self.told:
                self.told[request], self.last_first = [], now
            self.told[request].append(now)

    def all_told(self, requests: Sequence[Request], *, after: float) -> bool:
        """Return whether each request has got a token after that moment."""
        return all(self.told[request.key][-1] > after for request in requests)

    def gaps(self, request: Request, *, since: float) -> list[float]:
        """Return the gaps between its tokens, from the one before `since` until the first after all
        have one."""
        times = np.array(self.told[request.key])
        first, last = np.searchsorted(times, [since, self.last_first])
        gaps: list[float] = np.diff(times[first - 1 : last + 1]).tolist()
        return gaps

    def idle(self) -> None:
        raise AssertionError("there is work")


@dataclass(frozen=True, slots=True)
class Plan:
    prompts: int
    tokens: int
    running: int

    def requests(self) -> Iterator[Request]:
        """Yield the running requests, then the arriving ones, numbered from 0."""
        rng = np.random.default_rng(0)
        lengths = [RUNNING_TOKENS] * self.running + [self.tokens] * self.prompts
        for number, length in enumerate(lengths):
            runs = number < self.running
            sampling = SamplingParams(
                max_tokens=4096 if runs else ANSWER_TOKENS,
                seed=number,
                temperature=0.0,
                ignore_eos=True,
            )
            yield Request.of(
                RequestSpec(
                    token_ids=rng.integers(3, VOCABULARY_SIZE, length, dtype=np.int32).tobytes(),
                    sampling=sampling,
                ),
                key=number,
                deadline=time.monotonic() + 3600,
                arrived=time.monotonic(),
                origin=(1, number),
            )


def _engine(model: Path, plan: Plan) -> Engine:
    longest = max(plan.tokens + ANSWER_TOKENS, RUNNING_TOKENS + 4096)
    pages = -(-longest // PAGE_SIZE) * (plan.running + 1)
    pages += -(-(plan.tokens + ANSWER_TOKENS) // PAGE_SIZE) * plan.prompts
    config = EngineConfig(
        model=str(model),
        device="cpu",
        cache=CacheConfig(page_size=PAGE_SIZE, num_pages=pages, host_pages=0, prefix_cache=False),
        scheduler=SchedulerConfig(max_running=plan.running + plan.prompts),
    )
    return build(config)


def _scheduler(engine: Engine, plan: Plan, way: str, chunk_tokens: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_running=plan.running + plan.prompts,
            chunk_tokens=chunk_tokens,
            mixed_chunk=way == "mixed",
        ),
        eos_token_ids=(),
        vocabulary_size=VOCABULARY_SIZE,
        table=engine.table,
        pages=engine.pages,
        cache=engine.cache,
        tiers=engine.tiers,
        on_admit=lambda request, pages: None,
        next_rows=_WithQuota if way == "quota" else RowSelector,
    )


def measure(engine: Engine, plan: Plan, way: str, chunk_tokens: int) -> dict[str, Any]:
    """Measure one burst of prompts, in milliseconds."""
    scheduler = _scheduler(engine, plan, way, chunk_tokens)
    role = _Role(scheduler)
    loop = EventLoop(role, engine.runner)
    requests = list(plan.requests())
    running, coming = requests[: plan.running], requests[plan.running :]
    in_flight: LaunchedBatch | None = None
    for request in running:
        scheduler.add(request)
    while len(role.told) < plan.running or min(map(len, role.told.values())) < 20:
        in_flight = loop.step(in_flight)
    for request in coming:
        scheduler.add(request)
    came = time.process_time()
    forwards = without = longest = 0
    while len(role.told) < len(requests) or not role.all_told(running, after=role.last_first):
        in_flight = loop.step(in_flight)
        assert in_flight is not None
        forwards += 1
        without = without + 1 if in_flight.batch.mode is ForwardMode.EXTEND else 0
        longest = max(longest, without)
    gaps = [gap for request in running for gap in role.gaps(request, since=came)]
    firsts = [role.told[request.key][0] - came for request in coming]
    _end(scheduler, loop, in_flight, requests)
    itl, ttft = record.percentiles(gaps, 1e3), record.percentiles(firsts, 1e3)
    return {
        "way": way,
        "chunk": chunk_tokens,
        "itl_p50_ms": itl["p50"],
        "itl_p99_ms": itl["p99"],
        "itl_max_ms": round(max(gaps) * 1e3, 2),
        "forwards_without_a_token": longest,
        "ttft_p50_ms": ttft["p50"],
        "ttft_last_ms": round(max(firsts) * 1e3, 2),
        "forwards": forwards,
    }


def _end(
    scheduler: Scheduler, loop: EventLoop, in_flight: LaunchedBatch | None, requests: list[Request]
) -> None:
    """Free the engine's pages and slots for the next burst."""
    for request in requests:
        scheduler.abort(request, RequestEnd(FinishReason.ABORT))
    while in_flight is not None:
        in_flight = loop.step(in_flight)
    scheduler.check_idle()


def _median(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over several rounds of one way."""
    numbers = {name: float(np.median([row[name] for row in rows])) for name in list(rows[0])[1:]}
    return {"way": rows[0]["way"], **numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--running", type=int, default=4)
    parser.add_argument("--chunks", default="2048,256,64", help="prompt tokens per forward")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    plan = Plan(arguments.prompts, arguments.tokens, arguments.running)
    chunks = [int(chunk) for chunk in arguments.chunks.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        engine = _engine(make_checkpoint(Path(directory), **TINY), plan)
        measure(engine, Plan(2, plan.tokens, plan.running), WAYS[0], chunks[0])  # warm-up
        rounds = [
            [measure(engine, plan, way, chunk) for chunk in chunks for way in WAYS]
            for _ in range(arguments.rounds)
        ]
        engine.stream.close()
    rows = [_median(rows) for rows in zip(*rounds, strict=True)]
    for row in rows:
        first = next(r for r in rows if r["chunk"] == row["chunk"] and r["way"] == WAYS[0])
        for name in ("itl_p99", "ttft_p50", "ttft_last"):
            row[f"{name}_ratio"] = round(row[f"{name}_ms"] / first[f"{name}_ms"], 3)
    columns = {
        "way": "{way}",
        "chunk": "{chunk:.0f}",
        "ITL p50, ms": "{itl_p50_ms:.1f}",
        "p99": "{itl_p99_ms:.1f}",
        "max": "{itl_max_ms:.1f}",
        "forwards without": "{forwards_without_a_token:.0f}",
        "TTFT p50": "{ttft_p50_ms:.0f}",
        "last": "{ttft_last_ms:.0f}",
        "p99 to prefill first": "{itl_p99_ratio:.3f}",
        "TTFT p50 to it": "{ttft_p50_ratio:.2f}",
        "last to it": "{ttft_last_ratio:.2f}",
    }
    record.table(rows, columns)
    config = {**vars(arguments), "page_size": PAGE_SIZE, "clock": "CPU time of the process"}
    record.emit("local_prefill", config, rows)


if __name__ == "__main__":
    main()
