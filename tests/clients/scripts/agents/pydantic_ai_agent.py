"""pydantic-ai: an agent with one tool, over both of OpenAI's forms, whole and streamed."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:]


async def main() -> None:
    provider = OpenAIProvider(base_url=url, api_key="x")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(model, provider=provider))
        called = []

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            called.append((a, b))  # noqa: B023
            return a + b

        answer = await agent.run("add 27 and 15")
        assert answer.output == "It is 42.", answer
        async with agent.run_stream("add 27 and 15") as stream:
            assert await stream.get_output() == "It is 42."
        assert called == [(27, 15)] * 2, called


asyncio.run(main())
