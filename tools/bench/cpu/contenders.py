"""Systems that the CPU benchmark compares in turns, each called with the same jobs.

All run at the same time, and only the measured one works. During its warm-up, a peer tries several
numbers of threads for each number of streams, and keeps the fastest.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.traffic.workload import WorkloadRequest
from tools.bench.support import peer
from tools.bench.support.load import Answer, Client, cpu_row, summary
from tools.bench.support.peer import listed, running, shortened
from tools.bench.support.record import ROOT, say
from tools.bench.support.systems import Mode, as_up

_WARM_UP_TOKENS = 4
_REPLY_S = 200.0
_CONVERT_S = 200.0

Row = dict[
    str, Any
]  # as in tools.bench.support.load.summary, with "token_ids" and, for a peer, "threads"


class LeftOut(Exception):
    """A system cannot be measured here. The message gives the reason in one line."""


class Contender(Protocol):
    async def warm_up(self, jobs: Sequence[WorkloadRequest], streams: int) -> None:
        """Prepare the system for jobs like these with this number of streams."""
        ...

    async def answers(self, jobs: Sequence[WorkloadRequest], streams: int) -> Row:
        """Run the jobs. Raises RuntimeError if the system or a response fails."""
        ...


@dataclass(frozen=True, slots=True)
class _Baton:
    client: Client

    async def warm_up(self, jobs: Sequence[WorkloadRequest], streams: int) -> None:
        await self.answers(shortened(jobs, _WARM_UP_TOKENS), streams)

    async def answers(self, jobs: Sequence[WorkloadRequest], streams: int) -> Row:
        return _row(await self.client.closed_loop(jobs, streams))


@dataclass(frozen=True, slots=True)
class _Threaded:
    """A peer that uses the fastest number of threads for each number of streams."""

    ask: Callable[[Sequence[WorkloadRequest], int, int], Awaitable[Row]]  # jobs, streams, threads
    threads: Sequence[int]
    fastest: dict[int, int] = field(default_factory=dict)

    async def warm_up(self, jobs: Sequence[WorkloadRequest], streams: int) -> None:
        took = {}
        for threads in self.threads:
            took[threads] = (await self.ask(shortened(jobs, _WARM_UP_TOKENS), streams, threads))[
                "wall_s"
            ]
        self.fastest[streams] = min(took, key=lambda threads: took[threads])

    async def answers(self, jobs: Sequence[WorkloadRequest], streams: int) -> Row:
        threads = self.fastest[streams]
        return {**await self.ask(jobs, streams, threads), "threads": threads}


@contextlib.asynccontextmanager
async def baton(mode: Mode, model: Path, flags: Sequence[str] = ()) -> AsyncIterator[Contender]:
    """Start Baton. Raises LeftOut if it does not start, for example because of an unknown flag."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            system = await stack.enter_async_context(as_up(mode, model, flags))
        except SystemExit as error:
            raise LeftOut(str(error).strip().splitlines()[-1]) from None
        yield _Baton(await stack.enter_async_context(Client(system.target)))


@contextlib.asynccontextmanager
async def transformers(model: Path, dtype: str, threads: Sequence[int]) -> AsyncIterator[Contender]:
    """Start transformers' continuous batching."""
    async with peer.transformers(model, "cpu", dtype, _REPLY_S) as run:

        async def ask(jobs: Sequence[WorkloadRequest], streams: int, count: int) -> Row:
            # The warm-up is for its loop, which is created again.
            return await run(jobs, shortened(jobs[:1], _WARM_UP_TOKENS), streams, count)

        yield _Threaded(ask, threads)


@contextlib.asynccontextmanager
async def llama(
    python: str | None, model: Path, name: str, threads: Sequence[int]
) -> AsyncIterator[Contender]:
    """Start llama.cpp on the same weights.

    Writes the weights as GGUF beside the checkpoint if they are missing.

    Args:
        python: Python with llama-cpp-python and gguf.
        name: "bf16" or "q8_0".

    Raises:
        LeftOut: there is no such Python, or it cannot write the files.
    """
    if python is None:
        raise LeftOut("no --llama-python was given")
    file = await _gguf(python, model) / f"{name}.gguf"
    async with running(
        [python, str(ROOT / "tools" / "bench" / "cpu" / "llama_peer.py"), str(file)]
    ) as process:

        async def ask(jobs: Sequence[WorkloadRequest], streams: int, count: int) -> Row:
            load = {"threads": count, "streams": streams, "jobs": listed(jobs)}
            reply = await process.ask(load, _REPLY_S)
            answers = [
                Answer(
                    job.group,
                    len(job.prompt),
                    due=answer["due"],
                    sent=answer["due"],
                    chunks=answer["chunks"],
                    output_tokens=len(answer["token_ids"]),
                    ended=answer["chunks"][-1],
                    token_ids=answer["token_ids"],
                )
                for job, answer in zip(jobs, reply["answers"], strict=True)
            ]
            return _row(answers) | cpu_row({"process": reply["cpu_s"]}, answers)

        yield _Threaded(ask, threads)


async def _gguf(python: str, model: Path) -> Path:
    directory = model.with_name(f"{model.name}-gguf")
    if not directory.exists():
        say(f"making {directory} ...")
        made = directory.with_suffix(".part")
        program = str(ROOT / "tools" / "bench" / "cpu" / "gguf_files.py")
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, program, str(model), str(made)),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await asyncio.wait_for(process.communicate(), _CONVERT_S)
        except OSError as error:
            raise LeftOut(f"--llama-python {python}: {error}") from None
        if process.returncode:
            raise LeftOut(errors.decode(errors="replace").strip().splitlines()[-1])
        made.rename(directory)  # atomic
    return directory


def _row(answers: Sequence[Answer]) -> Row:
    for answer in answers:
        if answer.error:
            raise RuntimeError(f"{answer.error}: {answer.detail}")
    return {**summary(answers), "token_ids": [answer.token_ids for answer in answers]}
