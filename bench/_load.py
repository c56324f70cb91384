"""Load on a router over gRPC, closed loop and open loop, and what its clients saw.

The client is a Python process that pays about 0.1 ms of CPU for each message: its own share of a
core is part of every result, and near 1.0 the numbers are the client's, not the server's.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from bench._record import percentiles
from common.rpc import make_channel
from protos.router_pb2 import GenerateRequest, GenerateResponse, TokenIds
from protos.router_pb2_grpc import RouterStub
from protos.sampling_pb2 import Sampling

REQUEST_S = 120.0  # longest wait for a whole answer


@dataclass(frozen=True, slots=True)
class Job:
    """One request: greedy, and never ended by a token."""

    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(slots=True)
class Answer:
    """What the client saw of one job. Times are time.perf_counter()."""

    sent: float  # open loop: when it was due, so that a late client cannot flatter the server
    arrivals: list[float] = field(default_factory=list)  # of messages that carried tokens
    token_ids: list[int] = field(default_factory=list)
    ended: float = 0.0
    error: str = ""


def make_jobs(
    count: int, *, prompt_tokens: int, output_tokens: int, vocabulary: int, seed: int
) -> list[Job]:
    """`count` random prompts without a common prefix; the same ones for the same seed."""
    prompts = np.random.default_rng(seed).integers(1, vocabulary, (count, prompt_tokens))
    return [Job(tuple(prompt), output_tokens) for prompt in prompts.tolist()]


class Client:
    """Many calls over one channel. Use as an async context manager."""

    def __init__(self, target: str) -> None:
        self._channel = make_channel(target)
        self._stub: Any = RouterStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def ask(self, job: Job, due: float | None = None) -> Answer:
        """Sends one job and takes its answer; what goes wrong is in `Answer.error`."""
        request = GenerateRequest(
            token_ids=TokenIds(ids=job.token_ids),
            sampling=Sampling(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True),
        )
        answer = Answer(sent=due if due is not None else time.perf_counter())
        try:
            message: GenerateResponse
            async for message in self._stub.Generate(request, timeout=REQUEST_S):
                if message.token_ids:
                    answer.arrivals.append(time.perf_counter())
                    answer.token_ids.extend(message.token_ids)
        except grpc.aio.AioRpcError as error:
            answer.error = f"{error.code().name}: {error.details()}"
        answer.ended = time.perf_counter()
        return answer

    async def closed_loop(self, jobs: Sequence[Job], streams: int) -> list[Answer]:
        """`streams` callers, each with one job under way, until all are done. In job order."""
        answers: list[Answer | None] = [None] * len(jobs)
        waiting: Iterator[tuple[int, Job]] = iter(enumerate(jobs))

        async def caller() -> None:
            for index, job in waiting:
                answers[index] = await self.ask(job)

        await asyncio.gather(*(caller() for _ in range(streams)))
        return [answer for answer in answers if answer is not None]

    async def open_loop(self, jobs: Sequence[Job], rate: float, seed: int) -> list[Answer]:
        """Poisson arrivals at `rate` jobs per second, however slow the answers are."""
        gaps = np.random.default_rng(seed).exponential(1.0 / rate, len(jobs)).tolist()
        due = time.perf_counter()
        calls: list[asyncio.Task[Answer]] = []
        for job, gap in zip(jobs, gaps, strict=True):
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            calls.append(asyncio.create_task(self.ask(job, due)))
        return list(await asyncio.gather(*calls))


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Throughput and latencies of one run.

    ttft: sent -> first token. itl: gap between messages, as a reader of the stream sees them (one
    message may carry several tokens). tpot: mean time per token of one answer after its first.
    """
    good = [answer for answer in answers if not answer.error]
    wall_s = _wall_s(answers)
    tokens = sum(len(answer.token_ids) for answer in good)
    messages = sum(len(answer.arrivals) for answer in good)
    gaps = [
        later - earlier
        for answer in good
        for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]
    per_token = [
        (answer.arrivals[-1] - answer.arrivals[0]) / (len(answer.token_ids) - 1)
        for answer in good
        if len(answer.token_ids) > 1
    ]
    firsts = [answer.arrivals[0] - answer.sent for answer in good if answer.arrivals]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s, 1),
        "tokens_per_message": round(tokens / max(1, messages), 2),
        "ttft_ms": percentiles(firsts, 1e3),
        "itl_ms": percentiles(gaps, 1e3),
        "tpot_ms": percentiles(per_token, 1e3),
    }


def cpu_row(spent_s: Mapping[str, float], answers: Sequence[Answer]) -> dict[str, Any]:
    """CPU seconds of each server process, as shares of a core and per token answered. Unlike wall
    time it hardly moves when the machine has other work."""
    wall_s, tokens = _wall_s(answers), sum(len(answer.token_ids) for answer in answers)
    return {
        "server_cpu": {name: round(seconds / wall_s, 2) for name, seconds in spent_s.items()},
        "server_cpu_us_per_token": round(1e6 * sum(spent_s.values()) / max(1, tokens), 1),
    }


def _wall_s(answers: Sequence[Answer]) -> float:
    return max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
