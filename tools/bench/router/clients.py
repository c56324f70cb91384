"""Clients of a measured router in their own process: a closed loop over HTTP or gRPC.

    python -m tools.bench.router.clients

Requests are encoded once and responses hardly parsed, because the clients share the machine with
the router. Each line of stdin is a load (JSON), and the response is a line on stdout.
"""

import asyncio
import json
import sys
import time
from typing import Any, cast

import httptools
import msgspec
import uvloop

from common.rpc import make_channel
from protos.router_pb2 import GenerateRequest
from protos.router_pb2_grpc import RouterStub
from protos.sampling_pb2 import Sampling

MODEL = "stub"
SENTENCE = "The quick brown fox jumps over the lazy dog, and again. "


class Load(msgspec.Struct, frozen=True):
    """A closed loop. The last fields are set for each turn."""

    protocol: str  # "http" | "grpc"
    max_tokens: int
    stream: bool
    prompt: str = SENTENCE
    clients: int = 64
    target: str = ""  # host:port
    seconds: float = 0.0


class Counts(msgspec.Struct):
    requests: int = 0
    tokens: int = 0
    failed: int = 0
    wall_s: float = 0.0


class _HttpClient(asyncio.Protocol):
    """A client that sends one request after the other on one connection."""

    def __init__(self, load: Load, request: bytes, until: float, counts: Counts) -> None:
        self._max_tokens = load.max_tokens
        self._request = request
        self._until = until
        self._counts = counts
        self._parser = httptools.HttpResponseParser(self)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._counts.requests += 1
        self._counts.tokens += self._max_tokens
        self._counts.failed += self._parser.get_status_code() != 200
        if time.perf_counter() < self._until:
            self._transport.write(self._request)
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if time.perf_counter() < self._until:
            self._counts.failed += 1
        if not self.over.done():
            self.over.set_result(None)


async def _http(load: Load, until: float, counts: Counts) -> None:
    content = {
        "model": MODEL,
        "prompt": load.prompt,
        "max_tokens": load.max_tokens,
        "stream": load.stream,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    body = json.dumps(content).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {load.target}\r\naccept: */*\r\n"
        "user-agent: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    host, _, port = load.target.rpartition(":")
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(load.clients):
        _, client = await loop.create_connection(
            lambda: _HttpClient(load, head.encode() + body, until, counts), host, int(port)
        )
        clients.append(client)
    await asyncio.gather(*(client.over for client in clients))


async def _grpc(load: Load, until: float, counts: Counts) -> None:
    sampling = Sampling(max_tokens=load.max_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(text=load.prompt, sampling=sampling)

    async def client(stub: Any) -> None:
        while time.perf_counter() < until:
            async for message in stub.Generate(request, timeout=60):
                counts.tokens += len(message.token_ids)
            counts.requests += 1

    async with make_channel(load.target) as channel:
        stub: Any = RouterStub(channel)  # type: ignore[no-untyped-call]
        await asyncio.gather(*(client(stub) for _ in range(load.clients)))


async def _turn(load: Load) -> Counts:
    counts = Counts()
    started = time.perf_counter()
    until = started + load.seconds
    async with asyncio.timeout(load.seconds + 60):
        await (_http if load.protocol == "http" else _grpc)(load, until, counts)
    counts.wall_s = time.perf_counter() - started
    return counts


def main() -> None:
    for line in sys.stdin:
        counts = uvloop.run(_turn(msgspec.json.decode(line, type=Load)))
        print(msgspec.json.encode(counts).decode(), flush=True)


if __name__ == "__main__":
    main()
