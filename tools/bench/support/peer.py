"""The process of a benchmark's peer, which reads and writes lines of JSON."""

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from bench.traffic.workload import WorkloadRequest
from tools.bench.support.record import ROOT

TRANSFORMERS = (sys.executable, "-m", "tools.bench.support.transformers_peer")
# Runs jobs, after others for warm-up, with this number of streams and of threads.
TransformersPeer: TypeAlias = Callable[
    [Sequence[WorkloadRequest], Sequence[WorkloadRequest], int, int], Awaitable[dict[str, Any]]
]
_MOST_BYTES = 1 << 26  # of one response
_TAIL_BYTES = 4000
_END_S = 10.0


class Peer:
    """A process that keeps running, for rounds in turns with other systems."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    async def ask(self, spec: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a spec and return the response.

        Raises:
            RuntimeError: the process has ended or is late. Contains the end of its output.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(spec).encode() + b"\n")
            line = await asyncio.wait_for(self._process.stdout.readline(), limit_s)
            reply: dict[str, Any] = json.loads(line)
        except (TimeoutError, OSError, ValueError) as error:
            self._errors.seek(0)
            said = self._errors.read()[-_TAIL_BYTES:].decode(errors="replace").strip()
            raise RuntimeError(f"the peer failed ({type(error).__name__}):\n{said}") from None
        return reply


@contextlib.asynccontextmanager
async def running(command: Sequence[str]) -> AsyncIterator[Peer]:
    """Run the peer with `command` while inside the context."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            limit=_MOST_BYTES,
        )
        try:
            yield Peer(process, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # it has no state to save
            await asyncio.wait_for(process.wait(), _END_S)


@contextlib.asynccontextmanager
async def transformers(
    model: Path, device: str, dtype: str, limit_s: float
) -> AsyncIterator[TransformersPeer]:
    """Run tools.bench.support.transformers_peer while inside the context."""
    async with running(TRANSFORMERS) as peer:

        async def ask(
            jobs: Sequence[WorkloadRequest],
            warm_up: Sequence[WorkloadRequest],
            streams: int,
            threads: int,
        ) -> dict[str, Any]:
            spec = {
                "model": str(model),
                "device": device,
                "dtype": dtype,
                "streams": streams,
                "threads": threads,
                "warm_up": listed(warm_up),
                "jobs": listed(jobs),
            }
            return await peer.ask(spec, limit_s)

        yield ask


def listed(jobs: Sequence[WorkloadRequest]) -> list[tuple[Any, ...]]:
    return [dataclasses.astuple(job) for job in jobs]


def shortened(jobs: Sequence[WorkloadRequest], tokens: int) -> list[WorkloadRequest]:
    """Return the jobs with at most `tokens` tokens of output, to warm up."""
    return [dataclasses.replace(job, max_tokens=min(job.max_tokens, tokens)) for job in jobs]
