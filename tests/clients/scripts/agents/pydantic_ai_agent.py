"""pydantic-ai: an agent with one tool over both of OpenAI's APIs, streamed and not, and with an
output type."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:]


class Sum(BaseModel):
    answer: int


async def main() -> None:
    provider = OpenAIProvider(base_url=url, api_key="x")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(model, provider=provider))
        called = []

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            called.append((a, b))  # noqa: B023
            return a + b

        answer = await agent.run("add 27 and 15")
        assert answer.output == "It is 42.", answer
        async with agent.run_stream("add 27 and 15") as stream:
            assert await stream.get_output() == "It is 42."
        formed = await agent.run("add 27 and 15", output_type=NativeOutput(Sum))
        assert formed.output == Sum(answer=42), formed
        assert called == [(27, 15)] * 3, called


asyncio.run(main())
