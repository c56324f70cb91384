"""Unauthenticated calls of every method of every service: random messages in any order, raw
bytes, streams that never end, false metadata."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos import decode_pb2, kvtransfer_pb2, node_pb2, router_pb2
from tests.attack.random_messages import mutated, random_message
from tests.attack.target import Target

NUM_WORKERS = 6

_FILES: tuple[Any, ...] = (
    *(router_pb2, decode_pb2, kvtransfer_pb2, node_pb2, health_pb2, reflection_pb2),
)
_METHODS: tuple[MethodDescriptor, ...] = tuple(
    method
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
_MAX_MESSAGES = 30


async def unary(target: Target, draw: Random) -> None:
    """Send one message of the method's type, a corrupted one, or one of another type."""
    method = draw.choice(_METHODS)
    async with _channel(target, draw) as channel:
        call = channel.unary_stream(_path(method))(
            _data(method, draw), metadata=_metadata(target, draw), timeout=5.0
        )
        async for _ in call:
            if draw.random() < 0.1:
                break
        call.cancel()


async def streamed(target: Target, draw: Random) -> None:
    """Send messages in any order, some of which get no answer, with or without an end."""
    method = draw.choice([each for each in _METHODS if each.client_streaming])
    async with _channel(target, draw) as channel:
        call = channel.stream_stream(_path(method))(
            metadata=_metadata(target, draw), timeout=draw.uniform(0.5, 6.0)
        )
        for _ in range(draw.randint(1, _MAX_MESSAGES)):
            await call.write(_data(method, draw))
        if draw.random() < 0.5:
            await call.done_writing()
        async with asyncio.timeout(draw.uniform(0.0, 2.0)):
            while await call.read() is not grpc.aio.EOF:
                pass
        call.cancel()


async def crowd(target: Target, draw: Random) -> None:
    """Open many streams on one connection, and send nothing."""
    method = draw.choice([each for each in _METHODS if each.server_streaming])
    async with _channel(target, draw) as channel:
        make = channel.stream_stream(_path(method))
        calls = [make(metadata=_metadata(target, draw), timeout=3.0) for _ in range(100)]
        await asyncio.sleep(draw.uniform(0.0, 2.0))
        for call in calls:
            call.cancel()


async def heavy(target: Target, draw: Random) -> None:
    """Send messages of the largest allowed size, with very many parts."""
    make = draw.choice(_HEAVY)
    path = draw.choice(("/baton.v1.Router/Generate", "/baton.v1.Router/Tokenize"))
    async with _to(target.router) as channel:
        call = channel.unary_stream(path)(
            make(draw.choice((1000, 100_000, 2_000_000))),
            metadata=_metadata(target, draw),
            timeout=8.0,
        )
        async for _ in call:
            pass


def _part(number: int, content: bytes) -> bytes:
    """Return a field of a message in its wire format."""
    size = len(content)
    low = [size >> shift & 127 for shift in range(0, max(size.bit_length(), 1), 7)]
    length = bytes([*(byte | 128 for byte in low[:-1]), low[-1]])
    return bytes((number << 3 | 2,)) + length + content


def _text(size: int) -> bytes:
    return _part(2, b"word and " * (size // 2))


def _messages(size: int) -> bytes:
    return _part(3, _part(1, b"") * size)


def _token_ids(size: int) -> bytes:
    return _part(4, _part(1, b"\x01" * size))


_HEAVY: tuple[Callable[[int], bytes], ...] = (_text, _messages, _token_ids)


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _data(method: MethodDescriptor, draw: Random) -> bytes:
    kind = method if draw.random() < 0.9 else draw.choice(_METHODS)
    message = random_message(GetMessageClass(kind.input_type), draw)
    data = message.SerializeToString()
    match draw.randrange(8):
        case 0:
            return mutated(data, draw)
        case 1:
            return draw.randbytes(draw.choice((1, 30, 5000)))
        case _:
            return data


def _metadata(target: Target, draw: Random) -> tuple[tuple[str, str | bytes], ...]:
    lies: tuple[tuple[str, str | bytes], ...] = (
        ("authorization", f"Bearer {target.api_key}"),
        ("authorization", "Bearer eyJhbGciOiJub25lIn0.eyJyb2xlIjoicm91dGVyIn0."),
        ("authorization", "Bearer " + "x" * 3000),
        ("traceparent", "00-" + "f" * 32),
        ("x-bin", draw.randbytes(300)),
    )
    chosen = draw.sample(lies, k=draw.randrange(3))
    return tuple(pair for pair in chosen if target.api_key or pair[1] != "Bearer ")


@asynccontextmanager
async def _channel(target: Target, draw: Random) -> AsyncIterator[grpc.aio.Channel]:
    address = draw.choice((target.router, target.router, target.prefill, target.decode))
    async with _to(address) as channel:
        yield channel


@asynccontextmanager
async def _to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel
