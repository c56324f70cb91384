"""Bytes on the HTTP port that no client would send, and clients that stop reading or writing."""

import asyncio
import json
from random import Random

from tests.attack.connections import connected, crowd_at
from tests.attack.random_messages import mutated
from tests.attack.target import Target

NUM_WORKERS = 6

_METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "CONNECT", "PRI", "get", "\x00", "A" * 300)
_PATHS = (
    *("/", "/v1/completions", "/v1/chat/completions", "/v1/models", "/cluster", "/requests"),
    *(
        "/requests/%00",
        "/metrics",
        "/openapi.json",
        "/../../etc/passwd",
        "//",
        "*",
        "/" + "a" * 9000,
    ),
    *("http://other/", "/v1/models/%ff", "/?" + "q=1&" * 500),
)
_LINES = (
    *("content-length: 0", "content-length: -1", "content-length: 99999999999999999999"),
    *(
        "content-length: 5\r\ncontent-length: 6",
        "transfer-encoding: chunked",
        "connection: upgrade",
    ),
    *("transfer-encoding: gzip, chunked", "transfer-encoding: chunked\r\ncontent-length: 3"),
    *("expect: 100-continue", "upgrade: h2c", "host: evil.example", "x: " + "y" * 40000),
    *("authorization: Bearer " + "z" * 5000, "content-type: application/json;" * 20, ": empty"),
    *("traceparent: 00-" + "f" * 32, "x-request-id: \x7f\xff", "x-session-id: " + "s" * 2000),
    *("accept-encoding: gzip", "cookie: " + "c=d; " * 500, " folded: yes", "origin: null"),
)


async def nonsense(target: Target, draw: Random) -> None:
    async with connected(target.http) as (reader, writer):
        writer.write(draw.randbytes(draw.choice((1, 10, 1000, 100_000))))
        await _drained(writer)
        await reader.read(4096)


async def odd_heads(target: Target, draw: Random) -> None:
    async with connected(target.http) as (reader, writer):
        for _ in range(draw.randint(1, 5)):
            lines = [f"{draw.choice(_METHODS)} {draw.choice(_PATHS)} HTTP/1.{draw.choice('0119')}"]
            lines += ["host: localhost"] if draw.random() < 0.9 else []
            lines += draw.choices(_LINES, k=draw.randint(0, 6))
            writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")
        await _drained(writer)
        await reader.read(1 << 16)


async def mutants(target: Target, draw: Random) -> None:
    async with connected(target.http) as (reader, writer):
        writer.write(mutated(_request(target, {"prompt": "add 1 2 =", "max_tokens": 4}), draw))
        await _drained(writer)
        await reader.read(1 << 16)


async def slow_sender(target: Target, draw: Random) -> None:
    """Send a request slowly. The router must eventually time out."""
    async with connected(target.http) as (reader, writer):
        for byte in _request(target, {"prompt": "x" * 400}):
            writer.write(bytes((byte,)))
            await asyncio.sleep(draw.choice((0.0, 0.05)))
        await reader.read(1 << 16)


async def crumbs(target: Target, draw: Random) -> None:
    """Send a body in chunks of two bytes, whose framing is longer."""
    async with connected(target.http) as (reader, writer):
        writer.write(_head(target, "transfer-encoding: chunked"))
        extension = ";x=" + "y" * draw.choice((0, 30))
        for _ in range(draw.choice((10, 1000, 30_000))):
            writer.write(f"2{extension}\r\n[[\r\n".encode())
        await _drained(writer)
        await reader.read(1 << 16)


async def unread_pipeline(target: Target, draw: Random) -> None:
    """Send many requests at once, and read none of the responses."""
    one = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with connected(target.http) as (_, writer):
        writer.write(one * draw.choice((10, 1000, 5000)))
        await asyncio.sleep(draw.uniform(0.5, 3.0))


async def unread_stream(target: Target, draw: Random) -> None:
    """Stream many choices to a client that reads nothing, and then disconnects or sends
    something."""
    async with connected(target.http) as (_, writer):
        body = {
            "prompt": "copy a b c =",
            "max_tokens": 200,
            "n": draw.choice((1, 8)),
            "stream": True,
        }
        writer.write(_request(target, {**body, "ignore_eos": True}))
        if draw.random() < 0.5:
            writer.write(b"G")
        await asyncio.sleep(draw.uniform(0.0, 2.0))


async def idle_crowd(target: Target, draw: Random) -> None:
    """Open connections that send nothing."""
    await crowd_at(target.http, 60, draw.uniform(0.5, 4.0))


async def _drained(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(3.0):
        await writer.drain()


def _head(target: Target, *lines: str) -> bytes:
    given = (
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        *([f"authorization: Bearer {target.api_key}"] if target.api_key else []),
        *lines,
    )
    return "\r\n".join(given).encode() + b"\r\n\r\n"


def _request(target: Target, content: object) -> bytes:
    body = json.dumps(content).encode()
    return _head(target, f"content-length: {len(body)}") + body
