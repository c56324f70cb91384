"""Load on a router over gRPC, with the loops of `bench`, as a client sees it.

The client is a Python process that needs about 0.1 ms of CPU for each message. Every result
contains its share of a core: near 1.0, the figures describe the client, not the server.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from bench.traffic.load import LoadGenerator, RequestOutcome
from bench.traffic.workload import WorkloadRequest
from common.rpc import make_channel
from protos.router_pb2 import (
    ChatMessage,
    ChatMessages,
    ChatPart,
    GenerateRequest,
    GenerateResponse,
    TokenIds,
)
from protos.router_pb2_grpc import RouterStub
from protos.sampling_pb2 import Sampling
from tools.bench.support.record import percentiles

REQUEST_S = 600.0  # timeout of a whole response
NO_BUDGETS: Mapping[str, float] = {}


@dataclass(slots=True)
class Answer(RequestOutcome):
    """The outcome of one job as the client saw it, with its tokens."""

    token_ids: list[int] = field(default_factory=list)


def make_jobs(
    count: int, *, prompt_tokens: int, output_tokens: int, vocabulary: int, seed: int
) -> list[WorkloadRequest]:
    """Return `count` random prompts without a common prefix, determined by the seed."""
    prompts = np.random.default_rng(seed).integers(1, vocabulary, (count, prompt_tokens))
    return [WorkloadRequest(tuple(prompt), output_tokens) for prompt in prompts.tolist()]


class Client:
    """A client with many calls on one channel. Use as an async context manager.

    Args:
        budgets_s: budgets of requests by group. Clients wait for twice as long.
    """

    def __init__(self, target: str, budgets_s: Mapping[str, float] = NO_BUDGETS) -> None:
        self._budgets_s = budgets_s
        self._channel = make_channel(target)
        self._stub: Any = RouterStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def ask(self, job: WorkloadRequest, start: float, due: float) -> Answer:
        """Send one job and return its response. A failure is in its `error`.

        Args:
            start: time.perf_counter() of the run's start, from which the response's times count.
        """
        budget_s = self._budgets_s.get(job.group)
        request = GenerateRequest(
            token_ids=TokenIds(ids=job.prompt),
            sampling=_greedy(job.max_tokens),
            timeout_s=budget_s,
        )
        answer = Answer(job.group, len(job.prompt), due, time.perf_counter() - start)
        await self._stream(request, REQUEST_S if budget_s is None else 2 * budget_s, start, answer)
        return answer

    async def generate(self, request: GenerateRequest) -> Answer:
        """Send any request and return its response. Raises SystemExit if it fails."""
        answer = Answer("", 0, 0.0, 0.0)
        await self._stream(request, REQUEST_S, time.perf_counter(), answer)
        if answer.error:
            raise SystemExit(f"a request failed: {answer.detail}")
        return answer

    async def look(self, image: bytes, max_tokens: int) -> list[int]:
        """Send a prompt with an image. Returns the tokens of the response."""
        message = ChatMessage(role="user", parts=[ChatPart(image=image)])
        request = GenerateRequest(
            messages=ChatMessages(messages=[message]), sampling=_greedy(max_tokens)
        )
        return (await self.generate(request)).token_ids

    async def _stream(
        self, request: GenerateRequest, timeout_s: float, start: float, answer: Answer
    ) -> None:
        """Fill in `answer`, whose times count from `start`."""
        answer.usage_reported = True
        try:
            message: GenerateResponse
            async for message in self._stub.Generate(request, timeout=timeout_s):
                if message.token_ids:
                    answer.chunks.append(time.perf_counter() - start)
                    answer.chunk_tokens.append(len(message.token_ids))
                    answer.token_ids.extend(message.token_ids)
        except grpc.aio.AioRpcError as error:
            answer.error, answer.detail = error.code().name, error.details() or ""
        answer.output_tokens = len(answer.token_ids)
        answer.ended = time.perf_counter() - start

    async def closed_loop(self, jobs: Sequence[WorkloadRequest], streams: int) -> list[Answer]:
        """Run all jobs with `streams` in flight. Returns the results in job order."""
        loop = _InOrder(self)
        async with loop.load.measuring():
            await loop.load.closed_loop(iter(jobs), concurrency=streams)
        return loop.answers(jobs)


def _greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class _InOrder:
    """A load whose responses are compared with another system's, job by job."""

    def __init__(self, client: Client) -> None:
        self.load = LoadGenerator(self._ask)
        self._client = client
        self._answers: dict[int, Answer] = {}

    def answers(self, jobs: Sequence[WorkloadRequest]) -> list[Answer]:
        return [self._answers[id(job)] for job in jobs]

    async def _ask(self, job: WorkloadRequest, start: float, due: float) -> Answer:
        answer = self._answers[id(job)] = await self._client.ask(job, start, due)
        return answer


def summary(answers: Sequence[RequestOutcome]) -> dict[str, Any]:
    """Return throughput and latencies of one run, named as in bench.summary.DEFINITIONS."""
    good = [answer for answer in answers if not answer.error]
    wall_s = _wall_s(answers)
    tokens = sum(answer.output_tokens for answer in good)
    messages = sum(len(answer.chunks) for answer in good)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s, 1),
        "tokens_per_message": round(tokens / max(1, messages), 2),
        "ttft_ms": percentiles((a.ttft for a in good if a.ttft is not None), 1e3),
        "itl_ms": percentiles((gap for answer in good for gap in answer.gaps), 1e3),
        "tpot_ms": percentiles((a.per_token for a in good if a.per_token is not None), 1e3),
    }


def cpu_row(spent_s: Mapping[str, float], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the CPU of each server process, as shares of a core and per output token.

    Unlike wall time, it hardly depends on other load.
    """
    wall_s, tokens = _wall_s(answers), sum(len(answer.token_ids) for answer in answers)
    return {
        "server_cpu": {name: round(seconds / wall_s, 2) for name, seconds in spent_s.items()},
        "server_cpu_us_per_token": round(1e6 * sum(spent_s.values()) / max(1, tokens), 1),
    }


def _wall_s(answers: Sequence[RequestOutcome]) -> float:
    return max(answer.ended for answer in answers) - min(answer.due for answer in answers)
