"""A router with one stub decode node, and OpenAI's own client of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from api.program.assembly import RunningRouter
from protos.decode_pb2 import FINISH_REASON_STOP
from tests.api.rig import byte_level_tokenizer, router_for
from tests.support.http_client import Response, get, post
from tests.support.stub_decode_node import StubDecodeNode, Submission

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def ids(text: str) -> list[int]:
    tokens: list[int] = byte_level_tokenizer().encode(text, add_special_tokens=False).ids
    return tokens


@dataclass(frozen=True, slots=True)
class Api:
    client: openai.AsyncOpenAI
    node: StubDecodeNode
    router: RunningRouter
    model: str

    async def post(self, path: str, **fields: Any) -> Response:
        """A request as it is written here, which a well-behaved client might never send."""
        return await post(self.router.http_port, path, fields)

    async def get(self, path: str, **headers: str) -> Response:
        return await get(self.router.http_port, path, **headers)

    async def complete(self, text: str = "done", **ends: Any) -> Submission:
        """Lets the next request that reaches the node be answered with `text`."""
        submit = await self.node.submitted()
        ended = {submit.number: FINISH_REASON_STOP}
        self.node.say({submit.number: ids(text)}, ended=ended, **ends)
        return submit


@asynccontextmanager
async def api_for(model: Path, **knobs: Any) -> AsyncIterator[Api]:
    """Ready. The client does not retry."""
    async with StubDecodeNode() as node:
        async with router_for(model, decode=[node.address], **knobs) as (grpc_client, router):
            await grpc_client.wait_until_serving()
            url = f"http://127.0.0.1:{router.http_port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
                yield Api(client, node, router, str(model))
