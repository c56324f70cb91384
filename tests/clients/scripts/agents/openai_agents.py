"""openai-agents: an agent with a tool and an output type, over both of OpenAI's APIs."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]


class Sum(BaseModel):
    answer: int


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="x", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        called = []

        @function_tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            called.append((a, b))  # noqa: B023
            return a + b

        agent = Agent(
            name="adder",
            instructions="Add with the tool.",
            model=kind(model=model, openai_client=client),
            tools=[add],
            output_type=Sum,
        )
        result = await Runner.run(agent, "add 27 and 15", max_turns=4)
        assert result.final_output == Sum(answer=42), result.final_output
        streamed = Runner.run_streamed(agent, "add 27 and 15", max_turns=4)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == Sum(answer=42), streamed.final_output
        assert called == [(27, 15)] * 2, called


asyncio.run(main())
