"""Agent frameworks, each with its own script, and a model with tool calls.

All are in one environment, see test_real_clients.py:

    sh tests/clients/install.sh clients agents
    REAL_CLIENTS=clients make test-long ARGS=tests/clients/test_frameworks.py
"""

from pathlib import Path

import pytest

from tests.clients.environments import SCRIPTS, installed, run, wanted
from tests.clients.model_that_calls import playing

pytestmark = [pytest.mark.long, installed]


@pytest.mark.parametrize(
    "script", sorted((SCRIPTS / "agents").glob("*.py"), key=str), ids=lambda path: path.stem
)
async def test_a_framework_calls_a_tool_and_answers(script: Path, tmp_path: Path) -> None:
    python = wanted("agents")
    async with playing(tmp_path) as talking:
        url = f"http://127.0.0.1:{talking.api.router.http_port}/v1"
        await run(python, script, [url, talking.api.model])
