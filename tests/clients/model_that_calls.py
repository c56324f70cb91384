"""A router before a node that plays a model which calls tools: for clients that run elsewhere.

It adds: offered tools it thinks and calls `add`, told the result it says it, else it says hello.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from protos.decode_pb2 import FINISH_REASON_STOP
from tests.router.talk import CALL, Talk, calling_model, talk


@asynccontextmanager
async def playing(directory: Path) -> AsyncIterator[Talk]:
    """Answers whatever comes, one token at a time."""
    async with talk(calling_model(directory)) as talking:
        answering = asyncio.create_task(_answer_all(talking))
        try:
            yield talking
        finally:
            answering.cancel()


async def _answer_all(talking: Talk) -> None:
    while True:
        number, prompt = await talking.asked()
        *tokens, last = talking.ids(_answer(prompt) + "</s>")
        for token in tokens:
            talking.api.node.say({number: [token]})
        talking.api.node.say({number: [last]}, ended={number: FINISH_REASON_STOP})


def _answer(prompt: str) -> str:
    if "[tool]" in prompt:
        return "<think>now I know</think>It is 42."
    if "<tools>" in prompt:
        return f"<think>I should add</think>\n{CALL}"
    return "hello"
