"""Arguments of the scripts in this folder, and a function that runs programs of their
environment."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

WAIT_S = 400.0


class Served(NamedTuple):
    """A router, from the command line."""

    url: str  # of HTTP, without /v1
    grpc: str  # host:port
    model: str  # model name for clients
    directory: str  # the model's files


def served() -> Served:
    return Served(*sys.argv[1:])


def ran(program: Path, *arguments: str, **environment: str) -> str:
    """Run a program in its own directory and return its standard output.

    Raises:
        SystemExit: the program failed. Contains its output.
    """
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.run(
            [program, *arguments],
            cwd=directory,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    if process.returncode:
        sys.exit(f"{program.name} {process.returncode}\n{process.stdout}\n{process.stderr}")
    return process.stdout


def beside_python(name: str) -> Path:
    """Return the path of a program of this environment."""
    return Path(sys.executable).parent / name


def messages(text: str) -> list[dict]:
    """Parse consecutive JSON objects, as gRPC tools print a stream."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        message, end = decoder.raw_decode(text)
        found.append(message)
        text = text[end:]
    return found
