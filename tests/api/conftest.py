"""Fixtures: models, and routers in this process with stub nodes."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from api.program.assembly import RunningRouter
from tests.api.models import calling_model, model
from tests.api.rig import Api, Client, Pair, api_for, pair_for, served
from tests.support.network.http_client import Wire, connected
from tests.support.processes.stub_decode_node import StubDecodeNode

__all__ = ["model"]


@pytest.fixture(scope="session")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tool calls."""
    return calling_model(tmp_path_factory.mktemp("calling"))


@pytest.fixture
async def serving(model: Path) -> AsyncIterator[Any]:
    """A ready router with one decode node that prefills itself."""
    async with served(model) as parts:
        yield parts


@pytest.fixture
def client(serving: Any) -> Client:
    return serving[0]


@pytest.fixture
def node(serving: Any) -> StubDecodeNode:
    return serving[1]


@pytest.fixture
def router(serving: Any) -> RunningRouter:
    return serving[2]


@pytest.fixture
async def api(model: Path) -> AsyncIterator[Api]:
    async with api_for(model) as api:
        yield api


@pytest.fixture
async def talking(calling: Path) -> AsyncIterator[Api]:
    """A router whose model has tool calls."""
    async with api_for(calling) as talking:
        yield talking


@pytest.fixture
async def wire(api: Api) -> AsyncIterator[Wire]:
    """A connection to `api`."""
    async with connected(api.router.http_port) as wire:
        yield wire


@pytest.fixture
async def pair(model: Path) -> AsyncIterator[Pair]:
    async with pair_for(model) as pair:
        yield pair
