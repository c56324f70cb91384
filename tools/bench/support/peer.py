"""The process of a benchmark's peer, which reads and writes lines of JSON."""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import IO, Any

from tools.bench.support.record import ROOT

TRANSFORMERS = (sys.executable, "-m", "tools.bench.support.transformers_peer")
_MOST_BYTES = 1 << 26  # of one response
_TAIL_BYTES = 4000
_END_S = 10.0


def transformers_peer(spec: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Run tools.bench.support.transformers_peer on `spec` and return its output.

    Raises:
        RuntimeError: it fails. Contains the end of its output.
        subprocess.TimeoutExpired: it takes longer than `limit_s`.
    """
    done = subprocess.run(
        TRANSFORMERS,
        cwd=ROOT,
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    if done.returncode:
        raise RuntimeError(f"the peer failed:\n{done.stderr[-_TAIL_BYTES:]}")
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reply


class Peer:
    """A process that keeps running, for rounds in turns with other systems."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    async def ask(self, spec: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Return its response. Raises RuntimeError, with the end of its output, if it ends or is
        late."""
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
