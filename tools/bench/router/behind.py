"""Backends of the measured routers in one process: a decode node without an engine, and HTTP
servers with OpenAI's API. Both send the same responses.

    python -m tools.bench.router.behind

The first token of a request is sent immediately, each further one with the next step. A step is one
message of the decode node, and one event of each streaming HTTP response. Prints its addresses.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import httptools
import uvloop

from common import limits, rpc
from protos import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc
from tools.bench.router.clients import MODEL

HOST = "127.0.0.1"
NUM_WORKERS = 3  # HTTP servers: colocated, prefill, decode
STEP_S = 0.01
TOKEN = 42
_WORD = "x"  # the text of one token
_HEARTBEAT = decode_pb2.FromNode(engine_heartbeat=decode_pb2.EngineHeartbeat())
_HEARTBEAT_S = 1.0  # as in real nodes. Without heartbeats a router considers the engine dead


class Steps:
    """A timer that calls all waiting callbacks every STEP_S seconds."""

    def __init__(self) -> None:
        self.wanted_by: set[Callable[[], None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while True:
            next_at = max(next_at + STEP_S, loop.time())
            await asyncio.sleep(next_at - loop.time())
            for step in tuple(self.wanted_by):
                step()


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

        def step() -> None:
            nonlocal stepped
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
        reader = asyncio.create_task(reading())
        self._steps.wanted_by.add(step)
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
            self._steps.wanted_by.remove(step)
            reader.cancel()


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


class Worker(asyncio.Protocol):
    """One connection of an HTTP server that responds as an OpenAI server would."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._left = 0  # remaining events of the streaming response
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router that probes for gRPC
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._steps.wanted_by.discard(self._event)

    def on_url(self, url: bytes) -> None:
        self._url = url
        self._body = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._url.decode().partition("?")[0]
        if path.endswith("completions"):
            self._answer(json.loads(b"".join(self._body)))
        elif path == "/v1/models":
            self._reply({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:  # health checks and server properties that routers request
            self._reply({"status": "ok"})

    def _answer(self, request: dict[str, Any]) -> None:
        tokens = int(request.get("max_tokens") or 1)
        if not request.get("stream"):
            self._reply(_answer(request, _WORD * tokens, "length"))
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self._left = tokens
        self._event()
        if self._left:
            self._steps.wanted_by.add(self._event)

    def _event(self) -> None:
        self._left -= 1
        content = _answer({}, _WORD, None if self._left else "length")
        event = b"data: " + json.dumps(content).encode() + b"\n\n"
        if not self._left:
            self._steps.wanted_by.discard(self._event)
            event += b"data: [DONE]\n\n"
        end = b"" if self._left else b"0\r\n\r\n"
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, end))

    def _reply(self, content: object) -> None:
        body = json.dumps(content).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


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
    loop = asyncio.get_running_loop()
    server = rpc.make_server()
    node = ScriptedDecodeNode(steps)
    rpc.add_service(server, decode_pb2_grpc.add_DecodeNodeServicer_to_server, node)
    rpc.add_service(server, node_pb2_grpc.add_NodeServicer_to_server, node)
    ports = [rpc.bind(server, HOST, 0)]
    await server.start()
    workers = [await loop.create_server(lambda: Worker(steps), HOST, 0) for _ in range(NUM_WORKERS)]
    ports += [worker.sockets[0].getsockname()[1] for worker in workers]
    print(json.dumps([f"{HOST}:{port}" for port in ports]), flush=True)
    await steps.run()


if __name__ == "__main__":
    uvloop.run(_main())
