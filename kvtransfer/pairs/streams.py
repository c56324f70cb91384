"""The front's end of the transfer thread's socket: pair streams by number, both directions.

Knows which of its numbers are open and nothing of hand-offs. What a peer says is parsed before
it goes to the transfer thread; what the transfer thread says goes to the stream it names, or
nowhere if that stream is over. A stream that says more than the transfer thread takes is not read
any further until it does.
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
from common.logs.throttle import Throttle, ThrottledLog
from common.process.ipc import Backlogged, FrameConnection, PeerGone
from common.process.lanes import Lane
from common.rpc.streams import Outgoing
from kvtransfer.front_messages import (
    EngineBeat,
    LocalHello,
    PairClosed,
    PairEnd,
    PairHello,
    PairInput,
    PairMessage,
    PairOpened,
    PairOutput,
    PairSend,
)
from kvtransfer.messages import AnyMessage
from kvtransfer.pairing import Hello
from kvtransfer.pairs import codec
from protos import kvtransfer_pb2

log = logging.getLogger(__name__)

MAX_STREAMS = 1024
# Prompts with images are megabytes each, and may come all at once: two seconds of 1 Gbit/s.
_MAX_UNSENT_BYTES = 256 << 20
_LAST_WORDS_S = 0.5  # for the engine thread, or the end of the process, to say why

Outward: TypeAlias = kvtransfer_pb2.FromReader | kvtransfer_pb2.FromOwner


class PairMetrics(Protocol):
    """The metrics of a node that pairs change."""

    def pairing(self, result: Literal["up", "refused", "failed"], /) -> None: ...

    def stream_opened(self, kind: Literal["pair"], /) -> None: ...

    def stream_closed(self, kind: Literal["pair"], /) -> None: ...

    def cut_off(self) -> None: ...


class PairStream:
    """One pair stream, from both Hellos to its end."""

    def __init__(
        self, number: int, as_reader: bool, forward: Callable[[PairInput], Awaitable[None]]
    ) -> None:
        self.number = number
        self.as_reader = as_reader
        self.outgoing: Outgoing[Outward] = Outgoing(
            last_words=None if as_reader else codec.last_words, max_bytes=_MAX_UNSENT_BYTES
        )
        self.reason = "the peer has closed the stream"  # why it is over
        self.engine_died = False  # the peer's, which is why
        self._forward = forward

    async def take(self, message: Outward) -> None:
        """Parses a peer's message and forwards it; returns once another one may be read.

        Raises:
            ProtocolViolation: it is not what may come on this stream.
        """
        await self._forward(PairMessage(self.number, parsed(message)))


def parsed(message: Outward) -> AnyMessage:
    record = codec.parse(message)
    if isinstance(record, Hello):
        raise ProtocolViolation("a second Hello on a pair stream")
    return record


class PairStreams:
    """Event loop only.

    Args:
        sock: to the transfer thread; owned from now on.
        on_beat: called with each heartbeat's `late_s`.
    """

    def __init__(
        self, sock: socket.socket, metrics: PairMetrics, *, on_beat: Callable[[float], None]
    ) -> None:
        self._socket = sock
        self._metrics = metrics
        self._on_beat = on_beat
        self._connection: FrameConnection[PairOutput] = FrameConnection(
            PairOutput, self._take, self._end
        )
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._said_otherwise = asyncio.Event()  # another one for each Hello
        self._log = ThrottledLog(log, Throttle())
        self._numbers = itertools.count(1)
        self._streams: dict[int, PairStream] = {}

    async def run(self) -> None:
        """Carries messages until it is cancelled.

        Raises:
            EngineFault: the transfer thread is gone or does not read.
        """
        await self._connection.open(self._socket)
        try:
            reason = await self._over
            await asyncio.sleep(_LAST_WORDS_S)
            raise EngineFault(f"the transfer thread is gone: {reason}")
        finally:
            self._connection.close()

    async def local_hello(self) -> Hello:
        """What this node says first as a reader, once the transfer thread has told it."""
        return await asyncio.shield(self._hello)

    async def renewed(self, hello: Hello) -> None:
        """Returns once this node says something else first than that."""
        while await self.local_hello() == hello:
            await self._said_otherwise.wait()

    @contextmanager
    def opened(self, hello: Hello, *, as_reader: bool) -> Iterator[PairStream]:
        """A stream whose peer's Hello has come, known to the transfer thread while inside.

        Raises:
            NodeUnavailable: there is no transfer thread.
            Overloaded: there are too many.
        """
        if self._over.done():
            raise NodeUnavailable("the engine of this node has ended")
        if len(self._streams) >= MAX_STREAMS:
            raise Overloaded(f"{MAX_STREAMS} pair streams are open here")
        forward = partial(self._forward, Lane(self._connection))
        stream = PairStream(next(self._numbers), as_reader, forward)
        self._streams[stream.number] = stream
        self._metrics.stream_opened("pair")
        self._send(PairOpened(stream.number, hello, as_reader))
        self._log.info("pair stream", stream=stream.number, peer=hello.address, reader=as_reader)
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
                "pair stream over",
                stream=stream.number,
                peer=hello.address,
                because=stream.reason,
            )

    def close_all(self, error: ServingError) -> None:
        """Ends every stream, after what waits to be written."""
        for stream in self._streams.values():
            stream.outgoing.close(error)

    def _take(self, message: PairOutput) -> None:
        match message:
            case EngineBeat(late_s=late_s):
                self._on_beat(late_s)
            case LocalHello(hello=hello):
                if self._hello.done():
                    self._hello = asyncio.get_running_loop().create_future()
                self._hello.set_result(hello)
                self._said_otherwise.set()
                self._said_otherwise = asyncio.Event()
            case PairHello(stream=number, hello=said) | PairSend(stream=number, message=said):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.outgoing.put(codec.to_proto(said, as_reader=stream.as_reader))
            case PairEnd(stream=number, reason=reason, refused=refused):
                stream = self._streams.get(number)
                if stream is not None:
                    stream.outgoing.end((ProtocolViolation if refused else NodeUnavailable)(reason))

    async def _forward(self, lane: Lane, message: PairInput) -> None:
        with self._ends():
            lane.send(message)
            await lane.room()

    def _send(self, message: PairInput) -> None:
        with self._ends():
            self._connection.send(message)

    @contextmanager
    def _ends(self) -> Iterator[None]:
        """Without its transfer thread the node is of no use."""
        try:
            yield
        except PeerGone:
            self._end("end of file")
        except Backlogged as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)
