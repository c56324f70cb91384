"""Malicious processes of the cluster: a router, a consumer and a producer of pages, each with the
right credentials and fingerprint, which send random messages.

They never answer reads with wrong bytes. There is no protection against a node that has the
cluster's secret and sends wrong KV.
"""

import asyncio
import itertools
import mmap
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc.aio
import numpy as np

from common import limits, rpc
from common.identity.guard import CallAuthenticator, node_name, uncounted
from common.identity.program import identity_of
from common.identity.tokens import TokenAuthentication
from common.requests.namespace import as_bytes
from common.rpc.streams import StreamStatus, heard
from kvtransfer.backends.base import PagePool, PageProducer
from kvtransfer.backends.tcp.backend import TcpBackend
from kvtransfer.pairing import PROTOCOL_VERSION
from protos import decode_pb2, kvtransfer_pb2, request_pb2
from protos.decode_pb2_grpc import DecodeNodeStub
from protos.kvtransfer_pb2_grpc import (
    KvTransferServicer,
    KvTransferStub,
    add_KvTransferServicer_to_server,
)
from tests.attack.random_messages import random_message
from tests.attack.target import Target

NUM_WORKERS = 2

_DIFFERENCE = re.compile(r"(\S+) is ('.*?'|\d+) here and (?:unset|\d+) there\.")
_NUM_PAGES = 512
_PAGE_SIZE = 16


async def router(target: Target, draw: Random) -> None:
    """Submit and cancel random requests, and announce random peers."""
    async with _routing(target) as call:
        for _ in range(draw.randint(1, 40)):
            await call.write(random_message(decode_pb2.ToNode, draw))
            await asyncio.sleep(draw.choice((0.0, 0.0, 0.05)))


async def heavy_router(target: Target, draw: Random) -> None:
    """Send requests of the largest size, or empty ones, by the thousand."""
    empty = decode_pb2.Submit()
    long = decode_pb2.Submit(number=1, request={"token_ids": as_bytes([1] * 100_000)})
    submit = draw.choice((empty, long, _submit(draw, [], num_tokens=7000)))
    number = draw.choice((200, 100_000)) if submit is empty else 20
    async with _routing(target) as call:
        await call.write(decode_pb2.ToNode(submits=[submit] * number))
        await asyncio.sleep(draw.uniform(0.0, 3.0))


async def consumer(target: Target, draw: Random) -> None:
    """Open hand-offs, and continue them as no consumer would."""
    async with _consuming(target, draw) as (call, instance):
        for message in _of_a_consumer(draw, instance):
            await call.write(message)
            await asyncio.sleep(draw.choice((0.0, 0.0, 0.02)))
        async with asyncio.timeout(draw.uniform(0.0, 3.0)):
            while await call.read() is not grpc.aio.EOF:
                pass


async def heavy_consumer(target: Target, draw: Random) -> None:
    """Open prompts of a million tokens as fast as possible."""
    async with _consuming(target, draw) as (call, instance):
        for number in range(draw.choice((5, 40))):
            await call.write(_open(draw, instance, number, 1 << 20))


async def producer(target: Target, draw: Random) -> None:
    """A producer that a malicious router names to the decode node. It answers hand-offs with
    anything."""
    async with _lying(target, draw) as (liar, address), _routing(target, address) as call:
        async with asyncio.timeout(4.0):
            await liar.paired.wait()
        for _ in range(draw.randint(1, 20)):
            await call.write(decode_pb2.ToNode(submits=[_submit(draw, [address])]))
            await asyncio.sleep(draw.choice((0.0, 0.1)))


class _LyingProducer(KvTransferServicer):
    """Greets as a producer must, serves reads of random bytes, and answers everything, sometimes
    correctly."""

    def __init__(self, hello: kvtransfer_pb2.Hello, producer: PageProducer, draw: Random) -> None:
        self._hello = hello
        self._producer = producer
        self._draw = draw
        self._consumers = itertools.count(1)
        self.paired = asyncio.Event()

    async def Pair(
        self, messages: AsyncIterator[kvtransfer_pb2.FromConsumer], context: Any
    ) -> None:
        await anext(messages)
        consumer = next(self._consumers)
        path = kvtransfer_pb2.DataPath(backend="tcp", description=self._producer.admit(consumer))
        assert self._producer.publications is not None
        self._producer.publications.publish(consumer, np.arange(_NUM_PAGES, dtype=np.int32))
        hello = kvtransfer_pb2.Hello(paths=[path])
        hello.MergeFrom(self._hello)
        await context.write(kvtransfer_pb2.FromProducer(hello=hello))
        self.paired.set()
        ids = [kvtransfer_pb2.HandoffId(instance=1, request=1, attempt=1)]
        opened: dict[int, int] = {}  # request: tokens
        async for message in messages:
            match message.WhichOneof("message"):
                case "open":
                    ids.append(message.open.id)
                    opened[message.open.id.request] = (
                        len(message.open.prompt.request.token_ids) // 4
                    )
                case "grant" if self._draw.random() < 0.5:
                    num_tokens = opened.get(message.grant.id.request, 1)
                    await context.write(_plausible(message.grant, num_tokens))
                case "done" if self._draw.random() < 0.8:
                    released = kvtransfer_pb2.Released(id=message.done.id, held=True)
                    await context.write(kvtransfer_pb2.FromProducer(released=released))
            for _ in range(self._draw.randrange(2)):
                await context.write(self._lie(ids))

    def _lie(self, ids: Sequence[kvtransfer_pb2.HandoffId]) -> kvtransfer_pb2.FromProducer:
        id = self._draw.choice(ids)
        match self._draw.randrange(8):
            case 0 | 1 | 2:
                admitted = kvtransfer_pb2.Admitted(id=id, compute_tokens=self._draw.getrandbits(32))
                return kvtransfer_pb2.FromProducer(admitted=admitted)
            case 3 | 4:
                failed = kvtransfer_pb2.Failed(id=id, reason="a lie", retryable=True)
                return kvtransfer_pb2.FromProducer(failed=failed)
            case 5 | 6:
                beat = kvtransfer_pb2.Heartbeat(sequence=self._draw.getrandbits(64))
                return kvtransfer_pb2.FromProducer(heartbeat=beat)
        lie = random_message(kvtransfer_pb2.FromProducer, self._draw)
        _name(lie, id)
        return lie


def _plausible(grant: kvtransfer_pb2.Grant, num_tokens: int) -> kvtransfer_pb2.FromProducer:
    """All at once, like a producer that has everything cached."""
    num_pages = -(-(num_tokens - grant.prefix_tokens) // _PAGE_SIZE)
    ready = kvtransfer_pb2.Ready(
        id=grant.id,
        start=grant.prefix_tokens,
        end=num_tokens,
        pages=range(num_pages),
        last=True,
        first_token=1,
    )
    return kvtransfer_pb2.FromProducer(ready=ready)


def _of_a_consumer(draw: Random, instance: int) -> list[kvtransfer_pb2.FromConsumer]:
    """Return mostly messages that a consumer may send, in a wrong order."""
    return [_by_a_consumer(draw, instance) for _ in range(draw.randint(1, 60))]


KINDS = ("open", "grant", "done", "cancel", "forget", "heartbeat", "any")
WEIGHTS = (6, 6, 1, 2, 1, 2, 1)


def _by_a_consumer(draw: Random, instance: int) -> kvtransfer_pb2.FromConsumer:
    request, attempt = draw.randint(1, 4), draw.randint(1, 2)
    id = kvtransfer_pb2.HandoffId(instance=instance, request=request, attempt=attempt)
    match draw.choices(KINDS, WEIGHTS)[0]:
        case "open":
            return _open(draw, instance, request, draw.choice((1, 16, 33, 700)), attempt)
        case "grant":
            grant = kvtransfer_pb2.Grant(id=id, prefix_tokens=draw.choice((0, 0, 0, 16)))
            return kvtransfer_pb2.FromConsumer(grant=grant)
        case "done":
            return kvtransfer_pb2.FromConsumer(done=kvtransfer_pb2.Done(id=id))
        case "cancel":
            return kvtransfer_pb2.FromConsumer(cancel=kvtransfer_pb2.Cancel(id=id, reason="a lie"))
        case "forget":
            tokens = as_bytes(range(draw.choice((1, 16, 700))))
            return kvtransfer_pb2.FromConsumer(forget=kvtransfer_pb2.Forget(token_ids=tokens))
        case "heartbeat":
            beat = kvtransfer_pb2.Heartbeat(sequence=draw.getrandbits(64), open_handoffs=7)
            return kvtransfer_pb2.FromConsumer(heartbeat=beat)
    message = random_message(kvtransfer_pb2.FromConsumer, draw)
    message.ClearField("hello")
    _name(message, id)
    return message


def _name(
    message: kvtransfer_pb2.FromConsumer | kvtransfer_pb2.FromProducer, id: kvtransfer_pb2.HandoffId
) -> None:
    """Put the id of an existing hand-off into the message."""
    kind = message.WhichOneof("message")
    if kind not in (None, "hello", "forget", "heartbeat", "last_words"):
        getattr(message, kind).id.CopyFrom(id)


def _open(
    draw: Random, instance: int, request: int, num_tokens: int, attempt: int = 1
) -> kvtransfer_pb2.FromConsumer:
    opened = kvtransfer_pb2.Open(
        id=kvtransfer_pb2.HandoffId(instance=instance, request=request, attempt=attempt),
        remaining={"budget_s": 5.0},
        prompt={"request": _request(draw, num_tokens)},
    )
    return kvtransfer_pb2.FromConsumer(open=opened)


def _submit(draw: Random, addresses: list[str], num_tokens: int = 100) -> decode_pb2.Submit:
    return decode_pb2.Submit(
        number=draw.getrandbits(40),
        request=_request(draw, num_tokens),
        remaining={"budget_s": 4.0},
        prefill_addresses=addresses,
    )


def _request(draw: Random, num_tokens: int) -> request_pb2.Request:
    return request_pb2.Request(
        request_id="liar",
        token_ids=as_bytes([draw.randrange(500)] * num_tokens),
        sampling={"max_tokens": 4, "seed": 1},
    )


async def _learned(target: Target, draw: Random) -> kvtransfer_pb2.Hello:
    """Return a Hello that the node accepts. A node that rejects a Hello reports the expected
    values, as far as they fit into a sentence."""
    hello = kvtransfer_pb2.Hello(
        instance_id=draw.getrandbits(64),
        protocol_version=PROTOCOL_VERSION,
        regions=[kvtransfer_pb2.Region(base=1 << 30, page_bytes=1, num_pages=_NUM_PAGES)],
        address="127.0.0.1:1",
        tp=1,
        pp=1,
    )
    async with _as_node(target, target.prefill, hello) as channel:
        while await _corrected(channel, hello):
            pass
    return hello


async def _corrected(channel: grpc.aio.Channel, hello: kvtransfer_pb2.Hello) -> bool:
    """Send the Hello, and correct its fields that the node reports as different.

    Returns whether there were any.
    """
    call = KvTransferStub(channel).Pair(timeout=5.0)  # type: ignore[no-untyped-call]
    await call.write(kvtransfer_pb2.FromConsumer(hello=hello))
    await call.done_writing()
    reported = ""
    try:
        async for _ in heard(call):
            pass
    except StreamStatus as end:
        reported = end.sentence
    differences = _DIFFERENCE.findall(reported)
    for field, value in differences:
        if value.isdigit():
            hello.regions[0].page_bytes = int(value)
        else:
            hello.fingerprint[field] = value.strip("'")
    return bool(differences)


@asynccontextmanager
async def _routing(target: Target, *addresses: str) -> AsyncIterator[Any]:
    """Open a router's stream to the decode node, and announce these prefill nodes."""
    identity = identity_of("router", "liar", target.secret_file)
    peers = decode_pb2.Peers(prefill_addresses=addresses)
    async with rpc.make_channel(target.decode, None, identity) as channel:
        call = DecodeNodeStub(channel).Serve(timeout=8.0)  # type: ignore[no-untyped-call]
        await call.write(decode_pb2.ToNode(protocol_version=limits.VERSION, peers=peers))
        yield call
        call.cancel()


@asynccontextmanager
async def _consuming(target: Target, draw: Random) -> AsyncIterator[tuple[Any, int]]:
    """Pair with the prefill node. Yield the stream, and the own instance."""
    hello = await _learned(target, draw)
    async with _as_node(target, target.prefill, hello) as channel:
        call = KvTransferStub(channel).Pair(timeout=8.0)  # type: ignore[no-untyped-call]
        await call.write(kvtransfer_pb2.FromConsumer(hello=hello))
        await call.read()
        yield call, hello.instance_id
        call.cancel()


@asynccontextmanager
async def _as_node(
    target: Target, address: str, hello: kvtransfer_pb2.Hello
) -> AsyncIterator[grpc.aio.Channel]:
    identity = identity_of("node", node_name(hello.instance_id), target.secret_file)
    async with rpc.make_channel(address, None, identity) as channel:
        yield channel


@asynccontextmanager
async def _lying(target: Target, draw: Random) -> AsyncIterator["tuple[_LyingProducer, str]"]:
    """Return a producer of random bytes, and its address."""
    hello = await _learned(target, draw)
    page_bytes = hello.regions[0].page_bytes
    with mmap.mmap(-1, _NUM_PAGES * page_bytes) as memory:
        base = np.frombuffer(memory, np.uint8).ctypes.data
        hello.regions[0].base = base
        producer = TcpBackend("127.0.0.1").serve(
            PagePool(base, page_bytes, _NUM_PAGES, "cpu"), hello.instance_id
        )
        liar = _LyingProducer(hello, producer, draw)
        identity = identity_of("node", node_name(hello.instance_id), target.secret_file)
        assert identity is not None
        server = rpc.make_server()
        add = add_KvTransferServicer_to_server
        rpc.add_service(
            server, add, liar, CallAuthenticator(TokenAuthentication(identity), uncounted)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield liar, f"127.0.0.1:{port}"
        finally:
            await server.stop(None)
            await asyncio.to_thread(producer.close)
