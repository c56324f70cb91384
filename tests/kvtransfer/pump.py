"""A stand-in for the frontends of one consumer and one producer. It carries frames between their
transfer threads, through protobuf as the network would, and cuts streams on request. It works only
while the test waits for something."""

import time
from collections.abc import Callable

from common.process.ipc import FrameSocket, PeerGone, socket_pair
from kvtransfer.frontend_messages import (
    EndStream,
    EngineHeartbeat,
    LocalHello,
    PairClosed,
    PairInput,
    PairMessage,
    PairOpened,
    PairOutput,
    SendMessage,
)
from kvtransfer.messages import AnyMessage
from kvtransfer.pairing import PairHello
from kvtransfer.pairs import codec

WAIT_S = 60.0


class Pump:
    """A stream has the same number at both ends."""

    def __init__(self) -> None:
        self._sockets: dict[bool, FrameSocket[PairOutput]] = {}  # by whether it is the consumer's
        self._consumer_hello: PairHello | None = None
        self._streams = 0
        self._open: set[int] = set()
        self.ended: dict[int, EndStream] = {}  # by stream: the reason why an end has closed it
        self.beats = {True: 0, False: 0}  # of engines, by whether it is the consumer's
        self.late_s = {True: 0.0, False: 0.0}  # in the last heartbeat of each

    def join(self, *, as_consumer: bool) -> FrameSocket[PairInput]:
        """Return the transfer thread's end of a socket to this pump."""
        ours, theirs = socket_pair()
        self._sockets[as_consumer] = FrameSocket(ours, PairOutput)
        return FrameSocket(theirs, PairInput)

    def stop(self) -> None:
        for sock in self._sockets.values():
            sock.close()

    def connect(self) -> int:
        """Open the next stream after the consumer has introduced itself."""
        self.wait(lambda: self._consumer_hello is not None)
        assert self._consumer_hello is not None
        self._streams += 1
        self._open.add(self._streams)
        hello = through_protobuf(self._consumer_hello, as_consumer=True)
        assert isinstance(hello, PairHello)
        self._send(False, PairOpened(self._streams, hello, as_consumer=False))
        return self._streams

    def cut(self, stream: int, reason: str = "cut") -> None:
        """Cut the stream. Both ends notice it."""
        if stream in self._open:
            self._open.remove(stream)
            for as_consumer in (True, False):
                self._send(as_consumer, PairClosed(stream, reason))

    def say(self, stream: int, message: AnyMessage, *, to_consumer: bool) -> None:
        """Send a message that the other end would not send by itself."""
        self._send(to_consumer, PairMessage(stream, message))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Carry messages until the condition is true."""
        late = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < late, "it does not come about"
            for as_consumer, sock in list(self._sockets.items()):
                self._carry(as_consumer, sock)
            time.sleep(0.0005)

    def _carry(self, as_consumer: bool, sock: FrameSocket[PairOutput]) -> None:
        try:
            messages = sock.receive()
        except PeerGone:
            self._sockets.pop(as_consumer).close()
            for stream in list(self._open):
                self.cut(stream, "the engine has ended")
            return
        for message in messages:
            self._take(message, as_consumer=as_consumer)

    def _take(self, message: PairOutput, *, as_consumer: bool) -> None:
        match message:
            case LocalHello(hello) if as_consumer:
                self._consumer_hello = hello
            case SendMessage(stream, said) if stream in self._open:
                heard = through_protobuf(said, as_consumer=as_consumer)
                if isinstance(heard, PairHello):
                    self._send(True, PairOpened(stream, heard, as_consumer=True))
                else:
                    self._send(not as_consumer, PairMessage(stream, heard))
            case EngineHeartbeat(late_s=late_s):
                self.beats[as_consumer] += 1
                self.late_s[as_consumer] = late_s
            case EndStream(stream, reason):
                self.ended[stream] = message
                self.cut(stream, reason)

    def _send(self, as_consumer: bool, message: PairInput) -> None:
        if as_consumer in self._sockets:  # otherwise that node has ended
            self._sockets[as_consumer].send(message)


def through_protobuf(
    record: PairHello | AnyMessage, *, as_consumer: bool
) -> PairHello | AnyMessage:
    proto = codec.to_proto(record, as_consumer=as_consumer)
    return codec.parse(type(proto).FromString(proto.SerializeToString()))
