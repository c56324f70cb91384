"""Unmodified clients, each with a system that serves the demo model.

They need other versions of Baton's dependencies, so each has its own environment:

    sh tests/clients/install.sh clients        # takes minutes; with names: only these
    REAL_CLIENTS=clients make test-long ARGS=tests/clients
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cli.demo_model import write
from tests.clients.environments import SCRIPTS, installed, run, wanted
from tests.support.processes.cluster import Cluster

MODEL = "demo"

pytestmark = [pytest.mark.long, installed, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arguments(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[str]]:
    """Yield the command line of each script."""
    write(model := tmp_path_factory.mktemp("demo") / "model")
    logs = tmp_path_factory.mktemp("logs")
    flags = (f"--served-model-name={MODEL}",)
    async with Cluster(model, logs, with_secret=False, router_flags=flags) as cluster:
        url = f"http://127.0.0.1:{cluster.http_port}"
        yield [url, cluster.address, MODEL, str(model)]


@pytest.mark.parametrize(
    "script", sorted((SCRIPTS / "system").glob("with_*.py"), key=str), ids=lambda path: path.stem
)
async def test_a_client_is_served(script: Path, arguments: list[str]) -> None:
    await run(wanted(script.stem.removeprefix("with_")), script, arguments)
