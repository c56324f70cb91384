"""Environments of the clients that `install.sh` has installed, and a function that runs a script
in one."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
WAIT_S = 500.0

_DIRECTORY = os.environ.get("REAL_CLIENTS", "")
installed = pytest.mark.skipif(not _DIRECTORY, reason="REAL_CLIENTS names no directory of clients")


def wanted(name: str) -> Path:
    """Return the Python of that environment. Skip the test with the install command if there is
    none."""
    python = Path(_DIRECTORY).absolute() / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"sh tests/clients/install.sh {_DIRECTORY} {name}")
    return python


async def run(python: Path, script: Path, arguments: Sequence[str]) -> None:
    """Run the script. If it fails, the test fails with the end of its output."""
    client = await asyncio.create_subprocess_exec(
        python, script, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(WAIT_S):
            said, _ = await client.communicate()
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    assert client.returncode == 0, said.decode()[-4000:]
