"""Systems that the CPU benchmark compares. All run at the same time and get prompts in turns.

During its warm-up, a peer tries several numbers of threads for each number of streams, and keeps
the fastest.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.traffic.workload import WorkloadRequest
from tools.bench.cpu.figures import Measured
from tools.bench.cpu.floor import Floor
from tools.bench.support import peer
from tools.bench.support.load import Answer, Client, cpu_row, make_jobs, summary
from tools.bench.support.peer import listed, running, shortened
from tools.bench.support.record import ROOT, say
from tools.bench.support.systems import Mode, as_up

_HERE = ROOT / "tools" / "bench" / "cpu"
_WARM_UP_TOKENS = 4
_REPLY_S = 200.0
_CONVERT_S = 200.0
_ITS_OWN = 0  # number of threads that a system chooses

Jobs = Sequence[WorkloadRequest]
Row = dict[str, Any]  # as in tools.bench.support.load.summary, with "token_ids"


class LeftOut(Exception):
    """A system cannot be measured here. The message gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A running system.

    Attributes:
        ask: runs jobs with a number of streams and of threads. Raises RuntimeError if the system or
            a response fails.
        threads: numbers of threads to try.
        fastest: number of threads by number of streams.
    """

    ask: Callable[[Jobs, int, int], Awaitable[Row]]
    threads: Sequence[int] = (_ITS_OWN,)
    fastest: dict[int, int] = field(default_factory=dict)

    async def warm_up(self, jobs: Jobs, streams: int) -> None:
        took = {}
        for threads in self.threads:
            row = await self.ask(shortened(jobs, _WARM_UP_TOKENS), streams, threads)
            took[threads] = row["wall_s"]
        self.fastest[streams] = min(took, key=lambda threads: took[threads])

    async def answers(self, jobs: Jobs, streams: int) -> Row:
        threads = self.fastest[streams]
        row = await self.ask(jobs, streams, threads)
        return row if threads == _ITS_OWN else {**row, "threads": threads}


@contextlib.asynccontextmanager
async def baton(mode: Mode, model: Path, flags: Sequence[str] = ()) -> AsyncIterator[Contender]:
    """Start Baton. Raises LeftOut if it does not start."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            system = await stack.enter_async_context(as_up(mode, model, flags))
        except SystemExit as error:
            raise LeftOut(str(error).strip().splitlines()[-1]) from None
        client = await stack.enter_async_context(Client(system.target))

        async def ask(jobs: Jobs, streams: int, threads: int) -> Row:
            return _row(await client.closed_loop(jobs, streams))

        yield Contender(ask)


@contextlib.asynccontextmanager
async def transformers(model: Path, dtype: str, threads: Sequence[int]) -> AsyncIterator[Contender]:
    """Start transformers' continuous batching."""
    async with peer.transformers(model, "cpu", dtype, _REPLY_S) as run:

        async def ask(jobs: Jobs, streams: int, count: int) -> Row:
            # The warm-up is for its loop, which is created again.
            return await run(jobs, shortened(jobs[:1], _WARM_UP_TOKENS), streams, count)

        yield Contender(ask, threads)


@contextlib.asynccontextmanager
async def llama(
    python: str, model: Path, name: str, threads: Sequence[int]
) -> AsyncIterator[Contender]:
    """Start llama.cpp on the same weights.

    Writes the weights as GGUF beside the checkpoint if they are missing.

    Args:
        python: Python with llama-cpp-python and gguf.
        name: "bf16" or "q8_0".

    Raises:
        LeftOut: there is no such Python, or it cannot write the files.
    """
    if not python:
        raise LeftOut("no --llama-python was given")
    file = await _gguf(python, model) / f"{name}.gguf"
    async with running([python, str(_HERE / "llama_peer.py"), str(file)]) as process:

        async def ask(jobs: Jobs, streams: int, count: int) -> Row:
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

        yield Contender(ask, threads)


async def _gguf(python: str, model: Path) -> Path:
    directory = model.with_name(f"{model.name}-gguf")
    if not directory.exists():
        say(f"making {directory} ...")
        made = directory.with_suffix(".part")
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, str(_HERE / "gguf_files.py"), str(model), str(made)),
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


@dataclass(frozen=True, slots=True)
class StreamLoad:
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
        own = _random(self.requests, self.own_tokens or self.prompt_tokens, vocabulary, seed)
        prefixes = self.prefixes(vocabulary) or [WorkloadRequest((), 0)]
        prompts = [
            (*prefixes[number % len(prefixes)].prompt, *job.prompt)
            for number, job in enumerate(own)
        ]
        return [WorkloadRequest(prompt, self.output_tokens) for prompt in prompts]

    def prefixes(self, vocabulary: int) -> list[WorkloadRequest]:
        """Return requests that put every prefix into a prefix cache."""
        tokens = self.prompt_tokens - self.own_tokens
        return _random(self.num_prefixes, tokens, vocabulary, seed=0)


def _random(count: int, tokens: int, vocabulary: int, seed: int) -> list[WorkloadRequest]:
    return make_jobs(count, prompt_tokens=tokens, output_tokens=1, vocabulary=vocabulary, seed=seed)


Systems = Mapping[str, Callable[[], AbstractAsyncContextManager[Contender]]]


async def measured(
    systems: Systems,
    traffics: Sequence[StreamLoad],
    *,
    vocabulary: int,
    rounds: int,
    floor: Callable[[], Floor],
) -> Measured:
    """Measure every system with every traffic in every round, forwards and backwards in turn.

    Raises:
        RuntimeError: a running system fails.
    """
    found = Measured()
    async with contextlib.AsyncExitStack() as stack:
        up: dict[str, Contender] = {}
        for name, make in systems.items():
            say(f"  {name} ...")
            try:
                up[name] = await stack.enter_async_context(make())
            except LeftOut as reason:
                found.left_out[name] = str(reason)
                say(f"  {name} is left out: {reason}")
        for place, traffic in enumerate(traffics):
            jobs = traffic.jobs(vocabulary, _seed(0, place))
            for contender in up.values():
                if traffic.num_prefixes:  # puts the prefixes into a prefix cache
                    await contender.warm_up(traffic.prefixes(vocabulary), 1)
                await contender.warm_up(jobs, traffic.streams)
        for number in range(1, rounds + 1):
            say(f"  round {number} of {rounds}")
            found.floors.append(floor())
            for place, traffic in enumerate(traffics):
                jobs = traffic.jobs(vocabulary, _seed(number, place))
                for name in list(up) if number % 2 else list(up)[::-1]:
                    row = await up[name].answers(jobs, traffic.streams)
                    about = {"system": name, "load": traffic.name, "round": number}
                    found.table.rows.append({**row, **about})
                    say(
                        f"    {name}, {traffic.name}: {row['tokens_per_s']:.1f} tokens/s, first "
                        f"{row['ttft_ms']['p50']:.0f} ms, gap {row['itl_ms']['p50']:.1f} ms"
                    )
    return found


def _seed(number: int, place: int) -> int:
    """Return the seed of a traffic's prompts in a round. Never 0, the seed of the prefixes."""
    return 100_001 + 100 * number + place
