"""Frameworks that agents are written in, each by its own script, before a model that calls tools.

They want other versions of what Baton needs, so they live in an environment of their own:

    python -m venv clients
    clients/bin/pip install 'pydantic-ai-slim[openai]' langchain-openai litellm anthropic
    BATON_CLIENTS=clients/bin/python make test-long ARGS=tests/clients/test_frameworks.py
"""

import asyncio
import os
from pathlib import Path

import pytest

from tests.clients.model_that_calls import playing

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = os.environ.get("BATON_CLIENTS", "")
WAIT_S = 150.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="BATON_CLIENTS names no Python that has the clients"),
]


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.py")))
async def test_a_framework_calls_a_tool_and_answers(script: str, tmp_path: Path) -> None:
    async with playing(tmp_path) as talking:
        client = await asyncio.create_subprocess_exec(
            PYTHON,
            str(SCRIPTS / script),
            f"http://127.0.0.1:{talking.api.router.http_port}/v1",
            talking.api.model,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(WAIT_S):
            said, _ = await client.communicate()
        assert client.returncode == 0, said.decode()[-4000:]
