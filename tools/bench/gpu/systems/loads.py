"""Loads on a running system: single prompts, streams beside long prompts, full streams.

The client is a Python process that needs about 0.1 ms for each message, so the number of streams is
small, in order to measure the system and not the client.
"""

import asyncio
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.traffic.workload import WorkloadRequest
from tools.bench.support.load import Answer, Client, make_jobs, summary
from tools.bench.support.record import percentiles


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the loads, in tokens unless they are counts."""

    vocabulary: int
    prompt: int  # of single prompts
    prompts: int
    long_prompt: int
    streams: int
    stream_prompt: int
    stream_output: int
    rounds: int  # of full streams


class Loads:
    """Loads on one system. Every system gets the same prompts, which all differ from each other."""

    def __init__(self, client: Client, sizes: Sizes) -> None:
        self._client = client
        self._sizes = sizes

    async def warm_up(self) -> None:
        """Send warm-up requests of each kind."""
        await self._ask(self._jobs(2, self._sizes.prompt, 4, series=1), streams=2)
        await self._ask(self._jobs(1, self._sizes.long_prompt, 2, series=2), streams=1)

    async def single(self) -> list[Answer]:
        """Send one prompt after the other."""
        jobs = self._jobs(self._sizes.prompts, self._sizes.prompt, 8, series=3)
        return await self._ask(jobs, streams=1)

    async def full(self) -> tuple[list[Answer], dict[str, Any]]:
        """Run streams without pauses. Returns their responses and summary."""
        answers = await self._ask(self.full_jobs(self._sizes), self._sizes.streams)
        return answers, summary(answers)

    async def decoding(self) -> dict[str, float]:
        """Return the ITL of undisturbed streams in ms."""
        return _gaps(await self._ask(self._streams(series=5), self._sizes.streams))

    async def disturbed(self) -> tuple[dict[str, float], float]:
        """Return the ITL in ms of streams beside long prompts, and the seconds of one such prompt.

        The long prompts arrive at a rate at which prefill takes half of the time.
        """
        sizes = self._sizes
        (alone,) = await self._ask(self._jobs(1, sizes.long_prompt, 1, series=6), streams=1)
        took_s = alone.e2e
        streams = asyncio.create_task(self._ask(self._streams(series=7), sizes.streams))
        visitors: list[asyncio.Task[Answer]] = []
        jobs = iter(self._jobs(64, sizes.long_prompt, 1, series=8))
        while not streams.done() and (job := next(jobs, None)) is not None:
            visitors.append(asyncio.create_task(self._client.ask(job, time.perf_counter(), 0.0)))
            await asyncio.wait([streams], timeout=2.0 * took_s)
        gaps = _gaps(await streams)
        _check(await asyncio.gather(*visitors))
        return gaps, took_s

    @staticmethod
    def full_jobs(sizes: Sizes) -> list[WorkloadRequest]:
        return make_jobs(
            sizes.streams * sizes.rounds,
            prompt_tokens=sizes.stream_prompt,
            output_tokens=sizes.stream_output,
            vocabulary=sizes.vocabulary,
            seed=4,
        )

    async def _ask(self, jobs: Sequence[WorkloadRequest], streams: int) -> list[Answer]:
        answers = await self._client.closed_loop(jobs, streams)
        _check(answers)
        return answers

    def _streams(self, series: int) -> list[WorkloadRequest]:
        sizes = self._sizes
        return self._jobs(sizes.streams, sizes.stream_prompt, 4 * sizes.stream_output, series)

    def _jobs(self, count: int, prompt: int, output: int, series: int) -> list[WorkloadRequest]:
        return make_jobs(
            count,
            prompt_tokens=prompt,
            output_tokens=output,
            vocabulary=self._sizes.vocabulary,
            seed=series,
        )


def ttft_ms(answers: Sequence[Answer]) -> dict[str, float]:
    return percentiles((answer.chunks[0] - answer.due for answer in answers), 1e3)


def equal_share(answers: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    """Return the share of responses whose tokens all equal the other system's."""
    equal: int = sum(map(operator.eq, answers, others))
    return equal / len(answers)


def _gaps(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the gaps between messages while all streams decode.

    That is from the last first token to the first end.
    """
    begin = max(answer.chunks[0] for answer in answers)
    end = min(answer.chunks[-1] for answer in answers)
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.chunks, answer.chunks[1:], strict=False)
        if begin <= earlier and later <= end
    ]
    largest = round(1e3 * float(np.max(gaps, initial=0.0)), 2)
    return {**percentiles(gaps, 1e3), "max": largest}


def _check(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.error or not answer.chunks:
            raise RuntimeError(f"an answer is not what was asked for: {answer.error or answer}")
