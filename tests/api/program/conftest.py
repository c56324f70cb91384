"""Routers as separate processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.rig import ABSENT
from tests.support.processes.programs import Program


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Program]]:
    """Start a router on free ports, with these additional flags."""
    started: list[Program] = []

    def start(
        *flags: str, decode: str = ABSENT, model: Path = model, forked: bool = True
    ) -> Program:
        arguments = ("--model", str(model), "--decode", decode, "--port", "0", "--http-port", "0")
        started.append(Program("router", *arguments, *flags, forked=forked))
        return started[-1]

    yield start
    for program in started:
        program.close()
