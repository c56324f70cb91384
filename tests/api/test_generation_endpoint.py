"""One answer ends once, whatever happens to its choices."""

import asyncio
from typing import cast

import msgspec

from api.auth.client import Client, by_address
from api.dialect.generation_endpoint import GenerationEndpoint, ModelNames
from api.generation import Dispatcher, Write
from api.openai.completions import CompletionsEndpoint
from api.requests.answer import FinalChunk, TokenUsage
from api.requests.generate_params import GenerateParams
from api.requests.idempotency import IdempotencyCache
from common.errors import DeadlineExceeded
from router.metrics import RouterMetrics
from tests.support.http_client import Client as HttpClient


class OneTooSlow:
    """Two choices end; the client does not take the end of the first one within its budget."""

    def __init__(self) -> None:
        self._all_ended = asyncio.Event()

    async def generate(
        self, wanted: GenerateParams, client: Client, write: Write, *_: object
    ) -> None:
        last = FinalChunk("", (), "stop", None, TokenUsage(1, 1, 0), 0)
        if wanted.request_id.endswith("-0"):
            writing = asyncio.ensure_future(write(wanted.request_id, last))
            await self._all_ended.wait()
            writing.cancel()
            raise DeadlineExceeded("the request's total budget is spent")
        await asyncio.sleep(0)
        await write(wanted.request_id, last)
        self._all_ended.set()


async def test_an_answer_that_has_ended_does_not_end_again() -> None:
    http = HttpClient()
    body = msgspec.json.encode({"prompt": "x", "n": 2, "stream": True})
    request = http.request(body)
    answers = IdempotencyCache(cast(Dispatcher, OneTooSlow()), keep_s=30.0)
    endpoint = GenerationEndpoint(
        CompletionsEndpoint(ignore_unknown=False),
        answers,
        RouterMetrics(),
        lambda request, num_requests: by_address("10.0.0.1"),
        names=ModelNames("m", dict),
    )
    response = await endpoint(request)
    await response.prepare(request)
    await response.write_eof()
    assert http.written.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert http.written.count(b"\r\n0\r\n\r\n") == 1
