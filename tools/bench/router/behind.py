"""Backends of the measured routers in one process: a decode node without an engine, and HTTP
servers with OpenAI's API. Both send the same responses.

    python -m tools.bench.router.behind --http-workers 3 --step-s 0.01

The first token of a request is sent immediately, each further one with the next step. A step is one
message of the decode node, and one event of each streaming HTTP response. Prints its addresses.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httptools
import uvloop

from common import limits, rpc
from protos import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc

HOST = "127.0.0.1"
TOKEN = 42
MODEL = "stub"
_WORD = "x"  # the text of one token
_HEARTBEAT = decode_pb2.FromNode(engine_heartbeat=decode_pb2.EngineHeartbeat())
_HEARTBEAT_S = 1.0  # as in real nodes. Without heartbeats a router considers the engine dead


class Steps:
    """A timer that calls all waiting callbacks every `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.wanted_by: set[Callable[[], None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while True:
            next_at = max(next_at + self._step_s, loop.time())
            await asyncio.sleep(next_at - loop.time())
            for step in tuple(self.wanted_by):
                step()


class DecodeNode(decode_pb2_grpc.DecodeNodeServicer, node_pb2_grpc.NodeServicer):
    """A colocated decode node. Every token is TOKEN."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def Describe(self, request: node_pb2.DescribeRequest, context: Any) -> Any:
        return node_pb2.DescribeResponse(role="decode", instance_id=1, pids=[1], state="ready")

    async def Serve(self, messages: AsyncIterator[decode_pb2.ToNode], context: Any) -> None:
        left: dict[int, int] = {}
        fresh: dict[int, int] = {}
        intervals: dict[int, int] = {}
        held: dict[int, int] = {}
        news = asyncio.Event()
        loop = asyncio.get_running_loop()
        stepped, heartbeat_at = False, loop.time()

        def step() -> None:
            nonlocal stepped
            stepped = bool(left)
            if stepped or loop.time() >= heartbeat_at:
                news.set()

        async def reading() -> None:
            async for message in messages:
                for submit in message.submits:
                    fresh[submit.number] = submit.request.sampling.max_tokens
                    intervals[submit.number] = max(submit.request.stream_interval, 1)
                for number in message.cancels:
                    left.pop(number, None)
                    fresh.pop(number, None)
                if fresh:
                    news.set()

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
                begun = list(fresh)
                now = dict(fresh)
                fresh.clear()
                if stepped:
                    stepped = False
                    now |= left
                tokens = {}
                for number, num_left in now.items():
                    held[number] = held.get(number, 0) + 1
                    if number in begun or num_left == 1 or held[number] == intervals[number]:
                        tokens[number] = held.pop(number)
                if tokens:
                    await context.write(_step(tokens, now, begun))
                left.update((number, num_left - 1) for number, num_left in now.items())
                for number in [number for number, num_left in left.items() if not num_left]:
                    del left[number], intervals[number]
        finally:
            self._steps.wanted_by.remove(step)
            reader.cancel()


def _step(tokens: dict[int, int], now: dict[int, int], begun: list[int]) -> decode_pb2.FromNode:
    """Return a Step with this number of tokens for each request.

    The values of `now` are the tokens left, including the last one in this Step.
    """
    ended = [number for number in tokens if now[number] == 1]
    requests = [number for number, num_tokens in tokens.items() for _ in range(num_tokens)]
    return decode_pb2.FromNode(
        step=decode_pb2.Step(
            request=requests,
            token=[TOKEN] * len(requests),
            ended=ended,
            reason=[decode_pb2.FINISH_REASON_LENGTH] * len(ended),
            error=[""] * len(ended),
            error_code=[0] * len(ended),
            begun=begun,
            cached_tokens=[0] * len(begun),
        )
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


async def _main(options: argparse.Namespace) -> None:
    steps = Steps(options.step_s)
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        server = rpc.make_server()
        node = DecodeNode(steps)
        rpc.add_service(server, decode_pb2_grpc.add_DecodeNodeServicer_to_server, node)
        rpc.add_service(server, node_pb2_grpc.add_NodeServicer_to_server, node)
        ports = [rpc.bind(server, HOST, 0)]
        await server.start()
        for _ in itertools.repeat(None, options.http_workers):
            workers = await loop.create_server(lambda: Worker(steps), HOST, 0)
            await stack.enter_async_context(workers)
            ports.append(workers.sockets[0].getsockname()[1])
        print(json.dumps([f"{HOST}:{port}" for port in ports]), flush=True)
        await steps.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--http-workers", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.01)
    uvloop.run(_main(parser.parse_args()))
