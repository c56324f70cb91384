"""Loads on a running system: single prompts, streams beside long prompts, full streams.

The client is a Python process that needs about 0.1 ms for each message, so the number of streams is
small, in order to measure the system and not the client.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.traffic.workload import WorkloadRequest
from tools.bench.support.load import Answer, Client, make_jobs
from tools.bench.support.record import percentiles


class LoadSizes(NamedTuple):
    """Sizes of the loads, in tokens unless they are counts."""

    vocabulary: int
    prompt: int  # of single prompts
    prompts: int
    long_prompt: int
    streams: int
    stream_prompt: int
    stream_output: int
    rounds: int  # of full streams

    def jobs(self, count: int, prompt: int, output: int, series: int) -> list[WorkloadRequest]:
        """Return prompts that differ from each other and from those of other series."""
        return make_jobs(
            count,
            prompt_tokens=prompt,
            output_tokens=output,
            vocabulary=self.vocabulary,
            seed=series,
        )

    def full(self) -> list[WorkloadRequest]:
        count = self.streams * self.rounds
        return self.jobs(count, self.stream_prompt, self.stream_output, series=4)

    def long_running(self, series: int) -> list[WorkloadRequest]:
        return self.jobs(self.streams, self.stream_prompt, 4 * self.stream_output, series)


@dataclass(frozen=True, slots=True)
class SystemLoads:
    """Loads on one system. Every system gets the same prompts."""

    client: Client
    sizes: LoadSizes

    async def warm_up(self) -> None:
        """Send warm-up requests of each kind."""
        await self.ask(self.sizes.jobs(2, self.sizes.prompt, 4, series=1), streams=2)
        await self.ask(self.sizes.jobs(1, self.sizes.long_prompt, 2, series=2), streams=1)

    async def single(self) -> list[Answer]:
        """Send one prompt after the other."""
        jobs = self.sizes.jobs(self.sizes.prompts, self.sizes.prompt, 8, series=3)
        return await self.ask(jobs, streams=1)

    async def full(self) -> list[Answer]:
        """Run streams without pauses."""
        return await self.ask(self.sizes.full(), self.sizes.streams)

    async def decoding(self) -> dict[str, float]:
        """Return the ITL of undisturbed streams in ms."""
        return _itl_ms(await self.ask(self.sizes.long_running(series=5), self.sizes.streams))

    async def disturbed(self) -> tuple[dict[str, float], float]:
        """Return the ITL in ms of streams beside long prompts, and the seconds of one such prompt.

        The long prompts arrive at a rate at which prefill takes half of the time.
        """
        sizes = self.sizes
        (alone,) = await self.ask(sizes.jobs(1, sizes.long_prompt, 1, series=6), streams=1)
        running = self.ask(sizes.long_running(series=7), sizes.streams)
        streams = asyncio.create_task(running)
        prompts: list[asyncio.Task[Answer]] = []
        for job in sizes.jobs(64, sizes.long_prompt, 1, series=8):
            if streams.done():
                break
            prompts.append(asyncio.create_task(self.client.ask(job, time.perf_counter(), 0.0)))
            await asyncio.wait([streams], timeout=2.0 * alone.e2e)
        itl_ms = _itl_ms(await streams)
        _check(await asyncio.gather(*prompts))
        return itl_ms, alone.e2e

    async def ask(self, jobs: Sequence[WorkloadRequest], streams: int) -> list[Answer]:
        answers = await self.client.closed_loop(jobs, streams)
        _check(answers)
        return answers


def _itl_ms(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the gaps between messages from the last first token to the first end."""
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
