"""The frontend's end of the transfer thread's socket: pair streams by number, in both directions.

Knows which of its numbers are open and nothing of hand-offs. A peer's messages are parsed before
they go to the transfer thread. The transfer thread's messages go to the stream that they name, and
are dropped if it has ended. Backpressure: a stream that sends more than the transfer thread
consumes is not read until it catches up.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, Protocol, TypeAlias

from common.errors import (
    EngineDied,
    EngineFault,
    NodeUnavailable,
    Overloaded,
    ProtocolViolation,
    ServingError,
)
from common.logs import Throttle, ThrottledLog
from common.process.ipc import Backlogged, CallLane, FrameConnection, PeerGone
from common.rpc.streams import OutgoingStream
from kvtransfer.frontend_messages import (
    EngineHeartbeat,
    LocalHello,
    PairClosed,
    PairEnd,
    PairInput,
    PairMessage,
    PairOpened,
    PairOutput,
    PairSend,
    PeerHello,
)
from kvtransfer.messages import AnyMessage
from kvtransfer.pairing import PairHello
from kvtransfer.pairs import codec
from protos import kvtransfer_pb2

log = logging.getLogger(__name__)

MAX_STREAMS = 1024
# Prompts with images are megabytes each, and may arrive together: two seconds of 1 Gbit/s.
_MAX_UNSENT_BYTES = 256 << 20
# A few for each of thousands of requests: a busy peer may not read for as long as a forward pass.
_MAX_UNSENT = 16_384
_LAST_WORDS_S = 0.5  # for the engine thread, or the end of the process, to report the reason

Outward: TypeAlias = kvtransfer_pb2.FromConsumer | kvtransfer_pb2.FromProducer


class PairMetrics(Protocol):
    """The node metrics that pairs change."""

    def pairing(self, result: Literal["up", "refused", "failed"], /) -> None: ...

    def stream_opened(self, kind: Literal["pair"], /) -> None: ...

    def stream_closed(self, kind: Literal["pair"], /) -> None: ...

    def cut_off(self) -> None: ...


class PairStream:
    """One pair stream, from both Hellos to its end."""

    def __init__(
        self, number: int, as_consumer: bool, forward: Callable[[PairInput], Awaitable[None]]
    ) -> None:
        self.number = number
        self.as_consumer = as_consumer
        self.outgoing: OutgoingStream[Outward] = OutgoingStream(
            last_words=None if as_consumer else codec.last_words,
            max_messages=_MAX_UNSENT,
            max_bytes=_MAX_UNSENT_BYTES,
        )
        self.reason = "the peer has closed the stream"  # why it ended
        self.engine_died = False  # whether the peer's engine died, which ended it
        self._forward = forward

    async def take(self, message: Outward) -> None:
        """Parse a peer's message and forward it. Returns when another one may be read.

        Raises:
            ProtocolViolation: the message is not allowed on this stream.
        """
        await self._forward(PairMessage(self.number, parsed(message)))


def parsed(message: Outward) -> AnyMessage:
    record = codec.parse(message)
    if isinstance(record, PairHello):
        raise ProtocolViolation("a second Hello on a pair stream")
    return record


class PairStreams:
    """All pair streams of the node. Event loop only.

    Args:
        sock: to the transfer thread. Owned from now on.
        on_heartbeat: called with each heartbeat's `late_s`.
    """

    def __init__(
        self, sock: socket.socket, metrics: PairMetrics, *, on_heartbeat: Callable[[float], None]
    ) -> None:
        self._socket = sock
        self._metrics = metrics
        self._on_heartbeat = on_heartbeat
        self._connection: FrameConnection[PairOutput] = FrameConnection(
            PairOutput, self._take, self._end
        )
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._hello: asyncio.Future[PairHello] = asyncio.get_running_loop().create_future()
        self._said_otherwise = asyncio.Event()  # replaced for each Hello
        self._log = ThrottledLog(log, Throttle())
        self._numbers = itertools.count(1)
        self._streams: dict[int, PairStream] = {}

    async def run(self) -> None:
        """Carry messages until cancelled.

        Raises:
            EngineFault: the transfer thread is gone or does not read.
        """
        await self._connection.open(self._socket)
        try:
            reason = await self._over
            await asyncio.sleep(_LAST_WORDS_S)
            raise EngineFault(f"the transfer thread has ended: {reason}")
        finally:
            self._connection.close()

    async def local_hello(self) -> PairHello:
        """Return the Hello that this node sends first as a consumer. Waits until the transfer
        thread has sent it.
        """
        return await asyncio.shield(self._hello)

    async def renewed(self, hello: PairHello) -> None:
        """Return when this node's first Hello differs from `hello`."""
        while await self.local_hello() == hello:
            await self._said_otherwise.wait()

    @contextmanager
    def opened(self, hello: PairHello, *, as_consumer: bool) -> Iterator[PairStream]:
        """Open a stream whose peer's Hello has arrived. The transfer thread knows it inside the
        context.

        Raises:
            NodeUnavailable: there is no transfer thread.
            Overloaded: there are too many streams.
        """
        if self._over.done():
            raise NodeUnavailable("the engine of this node has ended")
        if len(self._streams) >= MAX_STREAMS:
            raise Overloaded(f"{MAX_STREAMS} pair streams are open here")
        forward = partial(self._forward, CallLane(self._connection))
        stream = PairStream(next(self._numbers), as_consumer, forward)
        self._streams[stream.number] = stream
        self._metrics.stream_opened("pair")
        self._send(PairOpened(stream.number, hello, as_consumer))
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
            self._send(PairClosed(stream.number, stream.reason, stream.engine_died))
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
                self._on_heartbeat(late_s)
            case LocalHello(hello=hello):
                if self._hello.done():
                    self._hello = asyncio.get_running_loop().create_future()
                self._hello.set_result(hello)
                self._said_otherwise.set()
                self._said_otherwise = asyncio.Event()
            case PeerHello(stream=number, hello=said) | PairSend(stream=number, message=said):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.outgoing.put(codec.to_proto(said, as_consumer=stream.as_consumer))
            case PairEnd(stream=number, reason=reason, refused=refused):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.outgoing.end((ProtocolViolation if refused else NodeUnavailable)(reason))

    async def _forward(self, lane: CallLane, message: PairInput) -> None:
        with self._ends():
            lane.send(message)
            await lane.room()

    def _send(self, message: PairInput) -> None:
        with self._ends():
            self._connection.send(message)

    @contextmanager
    def _ends(self) -> Iterator[None]:
        """End the node if the transfer thread has ended: the node cannot work without it."""
        try:
            yield
        except PeerGone:
            self._end("end of file")
        except Backlogged as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)
