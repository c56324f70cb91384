"""Fixtures of a router with two decode nodes, for requests that change their node."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from api.program.assembly import RunningRouter
from tests.api.rig import Client, two_nodes
from tests.support.processes.stub_decode_node import StubDecodeNode


@pytest.fixture
async def two(model: Path) -> AsyncIterator[Any]:
    """The first request goes to the first of the nodes."""
    async with two_nodes(model) as parts:
        yield parts


@pytest.fixture
def client(two: Any) -> Client:
    return two[0]


@pytest.fixture
def router(two: Any) -> RunningRouter:
    return two[1]


@pytest.fixture
def d0(two: Any) -> StubDecodeNode:
    return two[2]


@pytest.fixture
def d1(two: Any) -> StubDecodeNode:
    return two[3]
