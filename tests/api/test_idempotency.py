"""Clients that repeat a request with the same idempotency key, over HTTP and gRPC."""

import asyncio
import gc
import weakref
from typing import Any

import grpc
import pytest

from api.auth.client import Client, by_address
from api.idempotency import IdempotencyCache, IdempotentRetry
from api.requests.answer import FinalChunk, OutputChunk
from api.requests.answer import TokenUsage as AnswerUsage
from api.requests.generate_params import (
    GenerateParams,
    RenderedPrompt,
    RequestGroup,
    SharedPrompt,
    TextPrompt,
    TokenIdsPrompt,
)
from common.errors import InvalidRequest, NodeUnavailable
from common.requests.sampling import SamplingParams
from protos.decode_pb2 import FINISH_REASON_LENGTH
from protos.router_pb2 import GenerateRequest, TokenIds
from protos.sampling_pb2 import Sampling
from tests.api.models import ids
from tests.api.rig import COMPLETIONS, WAIT_S, Api, api_for, collect, eventually, fails, served
from tests.support.network.http_client import post

KEY = {"idempotency-key": "7a0c"}
FIELDS = {"prompt": "hello", "max_tokens": 32}
ME = by_address("10.0.0.1")
LONG_S = 3600.0  # nothing expires because a machine is slow


# Over HTTP and gRPC ------------------------------------------------------------------------------


async def test_a_repeated_request_gets_the_same_response(model):
    async with api_for(model, idempotency_ttl_s=LONG_S) as api:

        async def ask(**fields: Any) -> Any:
            return await post(api.router.http_port, COMPLETIONS, {**FIELDS, **fields}, **KEY)

        answering = asyncio.create_task(ask())
        await api.complete("one answer")
        first, again = await answering, await ask()
        assert first.json["choices"] == again.json["choices"]
        assert first.json["choices"][0]["text"] == "one answer"
        assert first.json["id"] == again.json["id"]
        assert first.json["usage"] == again.json["usage"]
        streamed = await ask(stream=True)
        assert streamed.status == 400 and "another request" in streamed.error["message"]
        # Without the key, or with another one, it is a separate request.
        _, answer = await api.answered(post(api.router.http_port, COMPLETIONS, FIELDS), "another")
        assert answer.json["choices"][0]["text"] == "another"


async def test_a_client_that_lost_its_connection_gets_the_whole_response(model):
    """Seen failing if the end of the first call ends the response: the node had a Cancel."""
    request = GenerateRequest(token_ids=TokenIds(ids=[5, 6, 7]), sampling=Sampling(max_tokens=4))
    metadata = (("idempotency-key", "7a0c"),)
    async with served(model, idempotency_ttl_s=LONG_S) as (client, node, r):
        first = client.stub.Generate(request, metadata=metadata, timeout=WAIT_S)
        number = (await node.submitted()).number
        node.say({number: ids("ab")})
        begun = await first.read()
        first.cancel()
        again = client.stub.Generate(request, metadata=metadata, timeout=WAIT_S)
        resumed = await again.read()
        assert (resumed.request_id, resumed.text) == (begun.request_id, begun.text)
        node.finish(number, ids("cd"), FINISH_REASON_LENGTH)
        text, tokens, last = await collect(again)
        assert resumed.text + text == "abcd" and last.finish_reason == "length"
        assert [*resumed.token_ids, *tokens] == ids("abcd")
        whole, _, _ = await collect(client.stub.Generate(request, metadata=metadata))
        assert whole == "abcd"
        assert r.admission.num_live == 0
        other = GenerateRequest(token_ids=TokenIds(ids=[5]), sampling=Sampling(max_tokens=4))
        await fails(
            client.stub.Generate(other, metadata=metadata, timeout=WAIT_S),
            grpc.StatusCode.INVALID_ARGUMENT,
        )
        long = (("idempotency-key", "x" * 257),)
        await fails(
            client.stub.Generate(other, metadata=long, timeout=WAIT_S),
            grpc.StatusCode.INVALID_ARGUMENT,
        )


async def test_another_router_generates_the_same_response_for_the_same_key(model):
    """It lacks the response of the first router, which has failed. It submits the request with
    the same seed."""

    async def seeds(api: Api, fields: dict[str, Any], **headers: str) -> set[int]:
        """Return the seeds that this router submits for a request that is then abandoned."""
        body = {**FIELDS, **fields}
        asking = asyncio.create_task(post(api.router.http_port, COMPLETIONS, body, **headers))
        reported = {(await api.node.submitted()).sampling.seed for _ in range(body.get("n", 1))}
        asking.cancel()
        return reported

    async with (
        api_for(model, idempotency_ttl_s=LONG_S) as one,
        api_for(model, idempotency_ttl_s=LONG_S) as other,
    ):
        mine = await seeds(one, {"n": 2}, **KEY)
        assert len(mine) == 2
        assert await seeds(other, {"n": 2}, **KEY) == mine
        assert mine.isdisjoint(await seeds(other, {"n": 2}, **{"idempotency-key": "9f"}))
        assert await seeds(other, {"seed": 5}, **{"idempotency-key": "a1"}) == {5}


async def test_if_keys_are_disabled_nothing_is_kept(model):
    async with api_for(model, idempotency_ttl_s=0.0) as api:
        for text in ("one", "two"):
            _, answer = await api.answered(
                post(api.router.http_port, COMPLETIONS, FIELDS, **KEY), text
            )
            assert answer.json["choices"][0]["text"] == text


# Kept responses and their clients -----------------------------------------------------------------


class Scripted:
    """A scripted generator."""

    def __init__(self, takes: bool = True) -> None:
        self._takes = takes  # whether every offered piece is accepted
        self.said: asyncio.Queue[OutputChunk | FinalChunk | Exception] = asyncio.Queue()
        self.num_begun = 0
        self.num_cancelled = 0

    async def generate(
        self,
        request: GenerateParams,
        client: Client,
        write: Any,
        traceparent: str = "",
        offer: Any = None,
    ) -> None:
        self.num_begun += 1
        try:
            while True:
                match await self.said.get():
                    case FinalChunk() as last:
                        await write(last)
                        return
                    case OutputChunk() as piece:
                        taken = offer(piece)
                        assert taken or not self._takes
                        if not taken:
                            await write(piece)
                    case error:
                        raise error
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def kept(scripted: Scripted) -> IdempotencyCache:
    return IdempotencyCache(scripted, keep_s=LONG_S)


def _request() -> GenerateParams:
    prompt = SharedPrompt(TextPrompt("x"))
    sampling = SamplingParams(max_tokens=8, seed=1)
    return GenerateParams(prompt=prompt, together=RequestGroup([prompt], 1), sampling=sampling)


def _piece(text: str) -> OutputChunk:
    return OutputChunk(text, (1,))


def _last(text: str = "") -> FinalChunk:
    return FinalChunk(text, (2,), "stop", None, AnswerUsage(1, 2, None), 0)


def _retry(kept: IdempotencyCache, client: Client = ME, content: bytes = b"a") -> IdempotentRetry:
    retry = kept.retry(client, "key", lambda: content, "own id")
    assert retry is not None
    return retry


async def _follow(
    kept: IdempotencyCache, client: Client = ME, request: GenerateParams | None = None
) -> str:
    texts: list[str] = []

    async def write(piece: OutputChunk | FinalChunk) -> None:
        texts.append(piece.text)

    await kept.generate(request or _request(), client, write, retry=_retry(kept, client))
    return "".join(texts)


async def test_two_simultaneous_requests_follow_one_response(scripted, kept):
    both = [asyncio.create_task(_follow(kept)) for _ in range(2)]
    for each in (_piece("a"), _piece("b"), _last("c")):
        scripted.said.put_nowait(each)
    assert await asyncio.gather(*both) == ["abc", "abc"]
    assert scripted.num_begun == 1


async def test_a_repeated_request_knows_the_rendered_prompt(scripted, kept):
    """The rendered prompt decides whether a response is parsed as reasoning or content."""
    first, again = _request(), _request()
    first.prompt.rendering = RenderedPrompt(1, "<think>")
    seen: list[str] = []

    async def write(piece: OutputChunk | FinalChunk) -> None:
        seen.append(again.prompt.rendering)

    scripted.said.put_nowait(_last("a"))
    await kept.generate(first, ME, write, retry=_retry(kept))
    await kept.generate(again, ME, write, retry=_retry(kept))
    assert seen == [RenderedPrompt(), RenderedPrompt(1, "<think>")]


async def test_no_client_gets_the_response_of_another(scripted, kept):
    """Seen failing if responses are identified by their key alone."""
    for client, text in ((ME, "mine"), (Client("another"), "another's")):
        scripted.said.put_nowait(_last(text))
        assert await _follow(kept, client) == text
    assert await _follow(kept) == "mine"
    with pytest.raises(InvalidRequest, match="another request"):
        _retry(kept, content=b"b")


async def test_a_failed_request_is_generated_again(scripted, kept):
    scripted.said.put_nowait(NodeUnavailable("no node"))
    with pytest.raises(NodeUnavailable):
        await _follow(kept)
    scripted.said.put_nowait(_last("well"))
    assert await _follow(kept) == "well"


async def test_a_response_without_readers_is_cancelled_and_dropped():
    scripted = Scripted()
    kept = IdempotencyCache(scripted, keep_s=0.05)
    leaving = asyncio.create_task(_follow(kept))
    await eventually(lambda: scripted.num_begun == 1)
    leaving.cancel()
    await eventually(lambda: scripted.num_cancelled == 1)
    scripted.said.put_nowait(_last("anew"))
    assert await _follow(kept) == "anew"
    await eventually(lambda: not len(kept))


async def test_kept_responses_are_limited_by_bytes_and_the_oldest_dropped():
    scripted = Scripted()
    kept = IdempotencyCache(scripted, keep_s=LONG_S, max_bytes=40_000)
    for number in range(50):
        scripted.said.put_nowait(_last("x" * 1000))
        client = Client(f"client {number}")
        await _follow(kept, client)
    await eventually(lambda: len(kept) == 4)
    assert await _follow(kept, client) == "x" * 1000  # the newest is there
    assert scripted.num_begun == 50


async def test_a_response_too_large_to_keep_reaches_only_its_present_readers():
    """At the speed of the slowest reader. Seen failing if it is kept nevertheless."""
    scripted = Scripted(takes=False)
    kept = IdempotencyCache(scripted, keep_s=LONG_S, max_bytes=10_000)
    texts: list[str] = []
    may_take = asyncio.Semaphore(0)

    async def write(piece: OutputChunk | FinalChunk) -> None:
        await may_take.acquire()
        texts.append(piece.text)

    following = asyncio.create_task(kept.generate(_request(), ME, write, retry=_retry(kept)))
    for _ in range(8):
        scripted.said.put_nowait(_piece("x" * 1000))
    scripted.said.put_nowait(_last("the end"))
    await eventually(lambda: not len(kept))
    waiting = scripted.said.qsize()
    assert waiting > 0 and not texts
    for _ in range(9):
        may_take.release()
    await following
    assert texts == [*["x" * 1000] * 8, "the end"]
    assert len(kept) == 0
    scripted.said.put_nowait(_last("anew"))
    assert await _follow(kept) == "anew"


async def test_only_the_length_of_a_prompt_is_kept():
    """Prompts are larger than responses and not counted. Seen failing if a kept response has its
    prompt."""

    class Tokens(list[int]):
        """A list that supports weak references."""

    scripted = Scripted()
    kept = IdempotencyCache(scripted, keep_s=LONG_S)
    request = _request()
    given = Tokens([1])
    request.prompt.prompt = TokenIdsPrompt(given)
    tokens = weakref.ref(given)
    scripted.said.put_nowait(_last("a"))
    await _follow(kept, request=request)
    del request, given
    await eventually(lambda: gc.collect() >= 0 and tokens() is None)
    assert len(kept) == 1
