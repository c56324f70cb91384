"""A router with a node that plays a model with tool calls, for clients in other environments.

The model adds numbers. With tools it thinks and calls `add`. After a result it responds with the
result, as JSON if a schema is requested. It follows grammars: if no call is allowed, it invents a
sum. Without tools it says hello.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from protos.sampling_pb2 import Guide
from tests.api.models import CALL, calling_model
from tests.api.rig import Api, api_for


@asynccontextmanager
async def playing(directory: Path) -> AsyncIterator[Api]:
    """Answer every request, one token at a time."""
    async with api_for(calling_model(directory)) as talking:
        answering = asyncio.create_task(_answer_all(talking))
        try:
            yield talking
        finally:
            answering.cancel()


async def _answer_all(talking: Api) -> None:
    while True:
        submit = await talking.node.submitted()
        number, guide = submit.number, submit.sampling.guide
        *tokens, last = talking.ids(_answer(talking.text(submit.token_ids), guide) + "</s>")
        for token in tokens:
            talking.node.say({number: [token]})
        talking.node.finish(number, [last])


def _answer(prompt: str, guide: Guide) -> str:
    has_form = guide.json_schema or '"type":"or"' in guide.structural_tag
    if "[tool]" in prompt:
        said = '{"answer": 42}' if has_form else "It is 42."
        return f"<think>now I know</think>{said}"
    if guide.json_schema:
        return '{"answer": 0}' if "<tools>" in prompt else '{"answer": 42}'
    if "<tools>" in prompt:
        return f"<think>I should add</think>\n{CALL}"
    return "hello"
