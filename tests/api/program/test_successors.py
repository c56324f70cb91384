"""A process of a router that follows another one knows its nodes before anybody comes to it."""

import asyncio
import time
from pathlib import Path

import pytest

from api.program import assembly
from api.program.assembly import run_router
from api.text import model_files
from common.config import RouterConfig
from router.workers import ProcessSlot
from tests.api.rig import ON_ANY_PORT
from tests.support.stub_decode_node import StubDecodeNode


def _config(model: Path, node: str) -> RouterConfig:
    return RouterConfig(server=ON_ANY_PORT, http_port=0, model=str(model), decode=(node,))


def _place(directory: Path) -> ProcessSlot:
    return ProcessSlot(0, 2, str(directory), time.monotonic(), again=True)


async def test_it_listens_once_a_request_could_be_placed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "FIRST_LOOK_S", 120.0)
    async with StubDecodeNode() as node, asyncio.timeout(110.0):
        config = _config(model, node.address)
        async with run_router(config, model_files.load(config.model), _place(tmp_path)) as router:
            assert router.cluster.usable()


async def test_it_listens_all_the_same_where_no_node_answers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "FIRST_LOOK_S", 0.05)
    config = _config(model, "127.0.0.1:1")
    async with run_router(config, model_files.load(config.model), _place(tmp_path)) as router:
        assert router.port and not router.cluster.usable()
