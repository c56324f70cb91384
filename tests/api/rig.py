"""Routers in this process with stub nodes, and their clients."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import openai
from grpc_health.v1 import health_pb2, health_pb2_grpc

from api.program.assembly import RunningRouter, run_router
from api.text import model_files
from common import rpc
from common.config import ClientsConfig, RouterConfig, ServerConfig
from protos import router_pb2, router_pb2_grpc
from protos.decode_pb2 import FINISH_REASON_STOP
from protos.sampling_pb2 import Guide, Sampling
from tests.api.models import Spoken
from tests.support.network.http_client import Response, get, post
from tests.support.processes.stub_decode_node import StubDecodeNode, StubNode, Submission

T = TypeVar("T")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PROMPT = [5, 6, 7]
WAIT_S = 60.0
# Timeout of requests that must time out at their node. A busy machine needs part of it to reach the
# node.
BUDGETS_S = [0.25 * 2**number for number in range(9)]
ON_ANY_PORT = ServerConfig(port=0)
AT_ONCE = ClientsConfig(max_queue_wait_s=0)  # no request waits for a slot
ABSENT = "127.0.0.1:1"  # a node that does not exist


def tool(name: str, **more: Any) -> dict[str, Any]:
    """Return a function in the format of OpenAI's tools."""
    return {"type": "function", "function": {"name": name, **more}}


class Client:
    """Calls one router. Errors remain grpc.aio.AioRpcError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    def generate(self, text: str = "", **fields: Any) -> Any:
        """Return a Generate call, with the prompt `text` unless `fields` has another one."""
        if text:
            fields["text"] = text
        return self.stub.Generate(router_pb2.GenerateRequest(**fields), timeout=WAIT_S)

    def chat(self, sampling: Any = None, **chat: Any) -> Any:
        """Return a Generate call of one user turn. `chat`: additional fields of its messages."""
        user = router_pb2.ChatMessage(role="user", content="hello")
        messages = router_pb2.ChatMessages(messages=[user], **chat)
        return self.generate(messages=messages, sampling=sampling)

    async def wait_until_serving(self, serving: bool = True) -> None:
        wanted = health_pb2.HealthCheckResponse.ServingStatus.Value(
            "SERVING" if serving else "NOT_SERVING"
        )
        watch = self._health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        async for response in watch:
            if response.status == wanted:
                watch.cancel()
                return


def ask(client: Client, **sampling: Any) -> Any:
    """Return a Generate call of PROMPT."""
    prompt = router_pb2.TokenIds(ids=PROMPT)
    return client.generate(token_ids=prompt, sampling=Sampling(**sampling))


async def submitted_or_over(node: StubDecodeNode, over: "asyncio.Task[Any]") -> Submission | None:
    """Return a request's Submit, or None if the request has ended without one."""
    submitted = asyncio.create_task(node.submitted())
    await asyncio.wait((submitted, over), return_when="FIRST_COMPLETED")
    if submitted.done():
        return submitted.result()
    submitted.cancel()
    return None


async def rest(call: Any) -> list[router_pb2.GenerateResponse]:
    """Return all remaining messages of a Generate call."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def collect(call: Any) -> tuple[str, list[int], router_pb2.GenerateResponse]:
    """Return all text and ids of a Generate call, and its last message."""
    messages = await rest(call)
    text = "".join(message.text for message in messages)
    return text, [token for message in messages for token in message.token_ids], messages[-1]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """Return the error with which a call must end."""
    try:
        await collect(call) if hasattr(call, "read") else await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


async def fails(call: Any, code: grpc.StatusCode, words: str = "") -> grpc.aio.AioRpcError:
    """Return the error of a call that must end with this status, and with these words in its
    sentence."""
    error = await failure(call)
    assert error.code() is code, error
    assert words in (error.details() or "")
    return error


def metric(router: RunningRouter, name: str, **labels: str) -> float | None:
    return router.metrics.registry.get_sample_value(name, labels)


async def eventually(holds: Any) -> None:
    """Wait for a condition that is only visible in a value: check until it holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110  (no code sets an event for it)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def router_for(
    model: Path,
    *,
    decode: Sequence[str],
    prefill: Sequence[str] = (),
    front: ServerConfig = ON_ANY_PORT,
    **knobs: Any,
) -> AsyncIterator[tuple[Client, RunningRouter]]:
    """Yield a router on its own ports, and a client of it. It may not be ready yet."""
    config = RouterConfig(
        server=front,
        http_port=0,
        model=str(model),
        decode=tuple(decode),
        prefill=tuple(prefill),
        **knobs,
    )
    async with run_router(config, [model_files.load(config.model)]) as router:
        async with rpc.make_channel(f"127.0.0.1:{router.port}") as channel:
            yield Client(channel), router


@asynccontextmanager
async def served(
    model: Path, node: StubDecodeNode | None = None, **knobs: Any
) -> AsyncIterator[tuple[Client, StubDecodeNode, RunningRouter]]:
    """Yield a ready router with one decode node that prefills itself."""
    async with node or StubDecodeNode() as node:
        async with router_for(model, decode=[node.address], **knobs) as (client, router):
            await client.wait_until_serving()
            yield client, node, router


@asynccontextmanager
async def decode_nodes(
    model: Path, count: int, **knobs: Any
) -> AsyncIterator[tuple[Client, RunningRouter, list[StubDecodeNode]]]:
    """Yield a router that can place requests on this number of nodes, which prefill themselves."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(StubDecodeNode()) for _ in range(count)]
        decode = [node.address for node in nodes]
        router = router_for(model, decode=decode, **knobs)
        client, running = await stack.enter_async_context(router)
        await eventually(lambda: len(running.cluster.usable()) == count)
        yield client, running, nodes


def usable(router: RunningRouter) -> list[str]:
    """Return the decode nodes on which a request could be placed."""
    return [choice.address for choice in router.cluster.usable()]


async def submitted_to_one_of(nodes: Sequence[StubDecodeNode]) -> tuple[StubDecodeNode, Submission]:
    """Return the node that receives the next request, and the submission."""
    tasks = {asyncio.create_task(node.submitted()): node for node in nodes}
    done, _ = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    (task,) = done
    return tasks[task], task.result()


@asynccontextmanager
async def two_nodes(
    model: Path, *, policy: str = "round_robin", **knobs: Any
) -> AsyncIterator[tuple[Client, RunningRouter, StubDecodeNode, StubDecodeNode]]:
    """Unless a policy decides otherwise, the first request goes to the first node."""
    async with decode_nodes(model, 2, policy=policy, **knobs) as (client, r, (d0, d1)):
        yield client, r, d0, d1


@dataclass(frozen=True, slots=True)
class Pair:
    """A ready router with a node of each role."""

    client: Client
    router: RunningRouter
    prefill: StubNode
    decode: StubDecodeNode

    async def post(self, path: str, **fields: Any) -> Response:
        return await post(self.router.http_port, path, fields)


@asynccontextmanager
async def pair_for(model: Path, *, serves_alone: bool = True, **knobs: Any) -> AsyncIterator[Pair]:
    async with StubNode() as prefill:
        knobs["prefill"] = [prefill.address]
        node = StubDecodeNode(paired=knobs["prefill"], serves_alone=serves_alone)
        async with served(model, node, **knobs) as (client, decode, router):
            yield Pair(client, router, prefill, decode)


@dataclass(frozen=True, slots=True)
class Served:
    """A router, a stub decode node of one of its models, and the model's name and tokens."""

    node: StubDecodeNode
    router: RunningRouter
    grpc: Client
    model: str
    spoken: Spoken

    def ids(self, text: str) -> list[int]:
        return self.spoken.ids(text)

    def text(self, token_ids: Iterable[int]) -> str:
        return self.spoken.text(token_ids)

    async def post(self, path: str, /, **fields: Any) -> Response:
        """Send a request exactly as written here, which a well-behaved client might never send."""
        return await post(self.router.http_port, path, fields)

    async def get(self, path: str, **headers: str) -> Response:
        return await get(self.router.http_port, path, **headers)

    async def refused(self, path: str, /, **fields: Any) -> tuple[int, str | None]:
        """Return the status of a rejected request, and the field that the error names."""
        answer = await self.post(path, **fields)
        return answer.status, answer.error["param"]

    async def refuses(self, param: str, path: str, /, **fields: Any) -> None:
        """Check that a request is refused by the name of this field, or of one in it."""
        status, named = await self.refused(path, **fields)
        assert status == 400
        assert (named or "").startswith(param), named

    async def complete(
        self, text: str = "done", reason: Any = FINISH_REASON_STOP, **ends: Any
    ) -> Submission:
        """Let `text` be the response to the next request that reaches the node."""
        submit = await self.node.submitted()
        self.node.finish(submit.number, self.ids(text), reason, **ends)
        return submit

    async def answered(
        self, asked: Awaitable[T], text: str = "done", **ends: Any
    ) -> tuple[Submission, T]:
        """Return the submission of a request, and the client's response with this `text`."""
        asking = asyncio.ensure_future(asked)
        submit = await self.complete(text, **ends)
        return submit, await asking

    async def ask(self, path: str, text: str = "done", /, **fields: Any) -> tuple[Submission, Any]:
        """Return the submission of a request, and its response, with status 200."""
        submit, answer = await self.answered(self.post(path, **fields), text)
        assert answer.status == 200, answer.body
        return submit, answer

    async def guide_of(self, path: str, /, **fields: Any) -> Guide:
        """Return the grammar that the node gets for a request."""
        submit, _ = await self.ask(path, **fields)
        guide: Guide = submit.sampling.guide
        return guide

    async def say_one_by_one(self, text: str, asked: Awaitable[T]) -> tuple[Submission, T]:
        """Return the submission and the client's response, with one token of `text` in each
        step."""
        asking = asyncio.ensure_future(asked)
        submit = await self.node.submitted()
        *tokens, last = self.ids(text)
        for token in tokens:
            self.node.say({submit.number: [token]})
        self.node.finish(submit.number, [last])
        return submit, await asking


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(Served):
    client: openai.AsyncOpenAI  # OpenAI's own client of the router

    async def chat(
        self, text: str, *, reason: Any = FINISH_REASON_STOP, **fields: Any
    ) -> tuple[Any, str]:
        """Return the choice for `text` with OpenAI's client, and the prompt."""
        asked = self.client.chat.completions.create(
            **{"messages": HELLO, "model": self.model, **fields}
        )
        submit, answer = await self.answered(asked, text, reason=reason)
        return answer.choices[0], self.text(submit.token_ids)


@asynccontextmanager
async def api_for(model: Path, **knobs: Any) -> AsyncIterator[Api]:
    """Yield a ready router. The client does not retry."""
    async with served(model, **knobs) as (grpc_client, node, router):
        url = f"http://127.0.0.1:{router.http_port}/v1"
        # By default each client reads all certificates of this machine, and none of them is used
        # here.
        http = openai.DefaultAsyncHttpxClient(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        async with openai.AsyncOpenAI(
            base_url=url, api_key="x", max_retries=0, http_client=http
        ) as client:
            yield Api(node, router, grpc_client, str(model), Spoken(model), client=client)
