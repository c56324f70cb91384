"""The frontend's end of the transfer thread's socket: forwards messages between pair streams and
the transfer thread, and serves the streams that consumers open.

It knows which streams are open, and nothing of hand-offs. A peer's messages are parsed before they
go to the transfer thread. Messages of the transfer thread for a stream that has ended are dropped.
Backpressure: a stream is not read while the transfer thread is behind.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import grpc.aio

from common import rpc
from common.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineFault,
    Forbidden,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    ProtocolViolation,
    ServingError,
    Unauthenticated,
)
from common.identity.guard import CallAuthenticator, Caller, node_name
from common.logs import ThrottledLog
from common.process.ipc import CallLane, FrameConnection
from common.rpc.streams import OutgoingStream, StreamStatus, heard
from kvtransfer.frontend_messages import (
    EndStream,
    EngineHeartbeat,
    LocalHello,
    PairClosed,
    PairMessage,
    PairOpened,
    PairOutput,
    SendMessage,
)
from kvtransfer.messages import HandoffFailed
from kvtransfer.pairing import PairHello
from kvtransfer.pairs import codec
from protos import kvtransfer_pb2, kvtransfer_pb2_grpc

log = logging.getLogger(__name__)

MAX_STREAMS = 1024
# Prompts with images are megabytes each and may arrive together. This is two seconds of 1 Gbit/s.
_MAX_UNSENT_BYTES = 256 << 20
# A few for each of thousands of requests: a busy peer may not read for as long as a forward pass.
_MAX_UNSENT = 16_384
_LAST_WORDS_S = 0.5  # for the engine thread, or the end of the process, to give the reason

Outward: TypeAlias = kvtransfer_pb2.FromConsumer | kvtransfer_pb2.FromProducer


class PairMetrics(Protocol):
    """The metrics that pair streams update."""

    def pairing(self, result: Literal["up", "refused", "failed"], /) -> None: ...

    def stream_opened(self, kind: Literal["pair"], /) -> None: ...

    def stream_closed(self, kind: Literal["pair"], /) -> None: ...

    def cut_off(self) -> None: ...


class PairStream:
    """One pair stream, from the exchange of Hello to its end."""

    def __init__(self, number: int, as_consumer: bool, lane: CallLane) -> None:
        self.number = number
        self.as_consumer = as_consumer
        self.outgoing: OutgoingStream[Outward] = OutgoingStream(
            last_words=None if as_consumer else codec.last_words,
            max_messages=_MAX_UNSENT,
            max_bytes=_MAX_UNSENT_BYTES,
        )
        self.reason = "the peer has closed the stream"  # why it ended
        self.engine_died = False  # whether it ended because the peer's engine died
        self._lane = lane

    async def take(self, message: Outward) -> None:
        """Parse a message from the peer and forward it. Returns when the next one may be read.

        Raises:
            ProtocolViolation: the message is not allowed on this stream.
        """
        record = codec.parse(message)
        if isinstance(record, PairHello):
            raise ProtocolViolation("a second Hello on a pair stream")
        self._lane.send(PairMessage(self.number, record))
        await self._lane.room()


def _ignored(now: float, late_s: float) -> None: ...


class PairStreams:
    """All pair streams of the node. Event loop only.

    Args:
        sock: socket to the transfer thread. Owned from now on.
    """

    def __init__(self, sock: socket.socket, metrics: PairMetrics) -> None:
        self._socket = sock
        self._metrics = metrics
        self._on_heartbeat: Callable[[float, float], None] = _ignored
        self._connection: FrameConnection[PairOutput] = FrameConnection(
            PairOutput, self._take, self._end
        )
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._hello: asyncio.Future[PairHello] = asyncio.get_running_loop().create_future()
        self._said_otherwise = asyncio.Event()  # replaced for each Hello
        self._log = ThrottledLog(log)
        self._numbers = itertools.count(1)
        self._streams: dict[int, PairStream] = {}

    async def run(self, on_heartbeat: Callable[[float, float], None] = _ignored) -> None:
        """Carry messages until cancelled.

        Args:
            on_heartbeat: called with the time of each heartbeat and its `late_s`.
        Raises:
            EngineFault: the transfer thread has ended or does not read.
        """
        self._on_heartbeat = on_heartbeat
        await self._connection.open(self._socket)
        try:
            reason = await self._over
            await asyncio.sleep(_LAST_WORDS_S)
            raise EngineFault(f"the transfer thread has ended: {reason}")
        finally:
            self._connection.close()

    async def local_hello(self) -> PairHello:
        """Return this node's Hello as a consumer, once the transfer thread has sent it."""
        return await asyncio.shield(self._hello)

    async def renewed(self, hello: PairHello) -> None:
        """Wait until this node's consumer Hello differs from `hello`."""
        while await self.local_hello() == hello:
            await self._said_otherwise.wait()

    @contextlib.contextmanager
    def opened(self, hello: PairHello, *, as_consumer: bool) -> Iterator[PairStream]:
        """Open a stream whose peer has sent Hello. The transfer thread knows the stream inside the
        context.

        Raises:
            NodeUnavailable: the transfer thread has ended.
            Overloaded: there are too many streams.
        """
        if self._over.done():
            raise NodeUnavailable("the engine of the node has ended")
        if len(self._streams) >= MAX_STREAMS:
            raise Overloaded(f"{MAX_STREAMS} pair streams are open here")
        stream = PairStream(next(self._numbers), as_consumer, CallLane(self._connection))
        self._streams[stream.number] = stream
        self._metrics.stream_opened("pair")
        self._connection.send(PairOpened(stream.number, hello, as_consumer))
        self._log.info(
            "pair stream opened", stream=stream.number, peer=hello.address, consumer=as_consumer
        )
        try:
            yield stream
        except Exception as error:
            stream.reason = str(error)
            stream.engine_died = isinstance(error, EngineDied)
            raise
        finally:
            del self._streams[stream.number]
            self._metrics.stream_closed("pair")
            if stream.outgoing.cut_off:
                self._metrics.cut_off()
            self._connection.send(PairClosed(stream.number, stream.reason, stream.engine_died))
            self._log.info(
                "pair stream closed",
                stream=stream.number,
                peer=hello.address,
                reason=stream.reason,
            )

    def close_all(self, error: ServingError) -> None:
        """End every stream, after its queued messages are written."""
        for stream in self._streams.values():
            stream.outgoing.close(error)

    def _take(self, message: PairOutput) -> None:
        match message:
            case EngineHeartbeat(late_s=late_s):
                self._on_heartbeat(time.monotonic(), late_s)
            case LocalHello(hello=hello):
                if self._hello.done():
                    self._hello = asyncio.get_running_loop().create_future()
                self._hello.set_result(hello)
                self._said_otherwise.set()
                self._said_otherwise = asyncio.Event()
            case SendMessage(stream=number, message=said):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.outgoing.put(codec.to_proto(said, as_consumer=stream.as_consumer))
            case EndStream(stream=number, reason=reason, refused=refused):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.outgoing.end((ProtocolViolation if refused else NodeUnavailable)(reason))

    def _end(self, reason: str) -> None:
        """End the node, because it cannot work without the transfer thread."""
        if not self._over.done():
            self._over.set_result(reason)


# Errors that last until a configuration or a node changes, unlike an unavailable node.
REFUSALS: dict[grpc.StatusCode, type[ServingError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolViolation,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
}


async def write(call: Any, message: codec.Proto) -> None:
    """Write a message, or drop it if the stream has ended. The reading side gets the reason."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(message)


async def incoming(call: Any) -> AsyncIterator[kvtransfer_pb2.FromProducer]:
    """Yield the producer's messages. Raises the end of the call as a ServingError, with the
    producer's own message.
    """
    try:
        async for message in heard(call):
            yield message
    except StreamStatus as end:
        died = end.code is EngineDied.status
        kind = EngineDied if died else REFUSALS.get(end.code, NodeUnavailable)
        raise kind(end.sentence or end.code.name) from end


HELLO_S = 5.0


class PairService(kvtransfer_pb2_grpc.KvTransferServicer):
    """The producer's side of pairing: serves the pair streams that consumers open. Event loop only.

    Args:
        check_ready: raises NodeUnavailable until the engine can pair.
        check_length: raises InvalidRequest if this number of tokens can never be served.
        on_named: called with the addresses of nodes that have part of a prompt, as its consumer
            reports them.
        on_encoders: called with the addresses of encode nodes for its images.
        hello_s: longest wait for a consumer's Hello.
    """

    def __init__(
        self,
        streams: PairStreams,
        check_ready: Callable[[], None],
        check_length: Callable[[int], None],
        *,
        on_named: Callable[[Iterable[str]], None] = lambda addresses: None,
        on_encoders: Callable[[Iterable[str]], None] = lambda addresses: None,
        hello_s: float = HELLO_S,
    ) -> None:
        self._on_named = on_named
        self._on_encoders = on_encoders
        self._streams = streams
        self._check_ready = check_ready
        self._check_length = check_length
        self._hello_s = hello_s
        self._draining = False

    def register(
        self, server: grpc.aio.Server, guard: CallAuthenticator | None = None
    ) -> tuple[str, ...]:
        """Add the service to a server. Returns its name."""
        add = kvtransfer_pb2_grpc.add_KvTransferServicer_to_server
        return rpc.add_service(server, add, self, guard)

    async def Pair(
        self, messages: AsyncIterator[kvtransfer_pb2.FromConsumer], context: Any
    ) -> None:
        """Carry every hand-off of one consumer, until either side ends the stream.

        Status codes: UNAVAILABLE while the node starts or drains. FAILED_PRECONDITION if the
        consumer is incompatible (lists every difference) or breaks the protocol. PERMISSION_DENIED
        if it uses another caller's instance id. DEADLINE_EXCEEDED if it sends no Hello.
        """
        self._check_ready()
        if self._draining:
            raise NodeUnavailable("the node is draining")
        hello = await self._first(messages)
        _check_instance(hello, context.caller)
        with self._streams.opened(hello, as_consumer=False) as stream:
            await stream.outgoing.converse(context.write, messages, partial(self._take, stream))

    def drain(self) -> None:
        """Reject new streams from now on. Hand-offs on open streams finish."""
        self._draining = True

    def resume(self) -> None:
        self._draining = False

    async def _take(self, stream: PairStream, message: kvtransfer_pb2.FromConsumer) -> None:
        """Forward a message. An Open with more tokens than can be served fails here, before its
        tokens are read.
        """
        if message.HasField("open"):
            try:
                self._check_length(codec.num_tokens_of(message.open))
            except InvalidRequest as error:
                id = codec.id_of(message.open)
                refusal = codec.to_proto(
                    HandoffFailed(id, str(error), retryable=False), as_consumer=False
                )
                stream.outgoing.put(refusal)
                return
        await stream.take(message)
        prompt = message.open.prompt  # already parsed, so these are addresses
        if prompt.prefix_hints:
            self._on_named(each.address for each in prompt.prefix_hints)
        if prompt.encode_addresses:
            self._on_encoders(prompt.encode_addresses)

    async def _first(self, messages: AsyncIterator[kvtransfer_pb2.FromConsumer]) -> PairHello:
        try:
            message = await asyncio.wait_for(anext(messages, None), self._hello_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no Hello within {self._hello_s:g} s") from None
        hello = codec.parse(message) if message is not None else None
        if not isinstance(hello, PairHello):
            raise ProtocolViolation("the first message of a pair stream is not Hello")
        return hello


def _check_instance(hello: PairHello, caller: Caller) -> None:
    """Raise Forbidden unless the instance is the caller's: hand-offs and data keys depend on it."""
    if caller.name is not None and caller.name != node_name(hello.instance):
        raise Forbidden(
            f"Hello is of instance {node_name(hello.instance)}, the token of {caller.name[:100]!r}"
        )
