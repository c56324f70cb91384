"""Backends of the measured routers in one process: a decode node without an engine, and HTTP
servers with OpenAI's API. Both send the same responses.

    python -m tools.bench.router.behind

The first token of a request is sent immediately, each further one with the next step. A step is one
message of the decode node, and one event of each streaming HTTP response. Prints its addresses.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import uvloop
from aiohttp import web

from common import limits, rpc
from protos import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc
from tools.bench.router.clients import MODEL

HOST = "127.0.0.1"
NUM_SERVERS = 3  # HTTP servers: colocated, prefill, decode
STEP_S = 0.01
TOKEN = 42
_WORD = "x"  # the text of one token
_HEARTBEAT = decode_pb2.FromNode(engine_heartbeat=decode_pb2.EngineHeartbeat())
_HEARTBEAT_S = 1.0  # as in real nodes. Without heartbeats a router considers the engine dead


class Steps:
    """The steps that all responses share, every STEP_S seconds."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while True:
            next_at = max(next_at + STEP_S, loop.time())
            await asyncio.sleep(next_at - loop.time())
            begun, self._begun = self._begun, asyncio.Event()
            begun.set()

    async def next(self) -> None:
        """Wait for the next step."""
        await self._begun.wait()


@dataclass(slots=True)
class _ScriptedResponse:
    left: int  # tokens to generate
    interval: int  # tokens of a message, except the first one
    held: int = 0  # generated tokens that are not sent yet
    begun: bool = False


class ScriptedDecodeNode(decode_pb2_grpc.DecodeNodeServicer, node_pb2_grpc.NodeServicer):
    """A colocated decode node. Every token is TOKEN."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def Describe(self, request: node_pb2.DescribeRequest, context: Any) -> Any:
        return node_pb2.DescribeResponse(role="decode", instance_id=1, pids=[1], state="ready")

    async def Serve(self, messages: AsyncIterator[decode_pb2.ToNode], context: Any) -> None:
        live: dict[int, _ScriptedResponse] = {}
        news = asyncio.Event()
        loop = asyncio.get_running_loop()
        stepped, heartbeat_at = False, loop.time()

        async def stepping() -> None:
            nonlocal stepped
            while True:
                await self._steps.next()
                stepped = bool(live)
                if stepped or loop.time() >= heartbeat_at:
                    news.set()

        async def reading() -> None:
            async for message in messages:
                for submit in message.submits:
                    interval = max(submit.request.stream_interval, 1)
                    live[submit.number] = _ScriptedResponse(
                        submit.request.sampling.max_tokens, interval
                    )
                    news.set()
                for number in message.cancels:
                    live.pop(number, None)

        status = decode_pb2.Status(state="ready", serves_alone=True)
        await context.write(decode_pb2.FromNode(status=status, protocol_version=limits.VERSION))
        tasks = [asyncio.create_task(each) for each in (reading(), stepping())]
        try:
            while True:
                await news.wait()
                news.clear()
                if loop.time() >= heartbeat_at:
                    heartbeat_at = loop.time() + _HEARTBEAT_S
                    await context.write(_HEARTBEAT)
                due = {number: one for number, one in live.items() if stepped or not one.begun}
                stepped = False
                made = _step(due)
                for number in made.ended:
                    del live[number]
                if made.request:
                    await context.write(decode_pb2.FromNode(step=made))
        finally:
            for task in tasks:
                task.cancel()


def _step(due: Mapping[int, _ScriptedResponse]) -> decode_pb2.Step:
    """Generate one token for each response. Returns a Step with all tokens that are sent now."""
    begun = [number for number, one in due.items() if not one.begun]
    tokens, ended = list[int](), list[int]()  # the response of each token
    for number, one in due.items():
        one.left, one.held = one.left - 1, one.held + 1
        if not one.left:
            ended.append(number)
        if not one.begun or not one.left or one.held == one.interval:
            tokens += [number] * one.held
            one.held = 0
        one.begun = True
    return decode_pb2.Step(
        request=tokens,
        token=[TOKEN] * len(tokens),
        ended=ended,
        reason=[decode_pb2.FINISH_REASON_LENGTH] * len(ended),
        error=[""] * len(ended),
        error_code=[0] * len(ended),
        begun=begun,
        cached_tokens=[0] * len(begun),
    )


class OpenAiServer:
    """An HTTP server that responds as an OpenAI server would."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def listen(self) -> int:
        """Start. Returns the port."""
        application = web.Application()
        application.router.add_post("/v1/completions", self._completion)
        models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        application.router.add_get("/v1/models", _always(models))
        # Health checks and server properties that routers request.
        application.router.add_route("*", "/{path:.*}", _always({"status": "ok"}))
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        return int(runner.addresses[0][1])

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        tokens = int(asked.get("max_tokens") or 1)
        if not asked.get("stream"):
            return web.json_response(_answer(asked, _WORD * tokens, "length"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for left in reversed(range(tokens)):
            content = _answer({}, _WORD, None if left else "length")
            event = b"data: " + json.dumps(content).encode() + b"\n\n"
            await response.write(event if left else event + b"data: [DONE]\n\n")
            if left:
                await self._steps.next()
        return response


def _always(content: object) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def reply(request: web.Request) -> web.Response:
        return web.json_response(content)

    return reply


def _answer(request: dict[str, Any], text: str, finish_reason: str | None) -> dict[str, Any]:
    answer = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [{"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}],
        "usage": {"prompt_tokens": 16, "completion_tokens": len(text), "total_tokens": 17},
    }
    if "kv_transfer_params" in request:  # location of its pages, as a prefill server sends it
        answer["kv_transfer_params"] = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_block_ids": [1],
            "remote_engine_id": "0",
            "remote_host": HOST,
            "remote_port": 1,
        }
    return answer


async def _main() -> None:
    steps = Steps()
    server = rpc.make_server()
    node = ScriptedDecodeNode(steps)
    rpc.add_service(server, decode_pb2_grpc.add_DecodeNodeServicer_to_server, node)
    rpc.add_service(server, node_pb2_grpc.add_NodeServicer_to_server, node)
    ports = [rpc.bind(server, HOST, 0)]
    await server.start()
    ports += [await OpenAiServer(steps).listen() for _ in range(NUM_SERVERS)]
    print(json.dumps([f"{HOST}:{port}" for port in ports]), flush=True)
    await steps.run()


if __name__ == "__main__":
    uvloop.run(_main())
