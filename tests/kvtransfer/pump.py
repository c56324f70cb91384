"""A stand-in for the frontends of one consumer and one producer. It carries frames between their
transfer threads, through protobuf as the network would, and cuts streams on request."""

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from common.process.ipc import FrameSocket, PeerGone, WakeUp, socket_pair
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
    """All methods are called from the test's thread.

    A stream has the same number at both ends.
    """

    def __init__(self) -> None:
        self._sockets: dict[bool, FrameSocket[PairOutput]] = {}  # by whether it is the consumer's
        self._wake_up = WakeUp()
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._consumer_hello: PairHello | None = None
        self._streams = 0
        self._stopped = False
        self.open: set[int] = set()
        self.ended: dict[int, EndStream] = {}  # by stream: the reason why an end has closed it
        self.sent: list[AnyMessage] = []  # all messages, in both directions
        self.beats = {True: 0, False: 0}  # of engines, by whether it is the consumer's
        self.late_s = {True: 0.0, False: 0.0}  # in the last heartbeat of each
        self._thread = threading.Thread(target=self._run, name="pump", daemon=True)

    def join(self, *, as_consumer: bool) -> FrameSocket[PairInput]:
        """Return the transfer thread's end of a socket to this pump. Call it before `start`."""
        ours, theirs = socket_pair()
        self._sockets[as_consumer] = FrameSocket(ours, PairOutput)
        return _input_socket(theirs)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._call(self._stop)
        self._thread.join(WAIT_S)
        for sock in self._sockets.values():
            sock.close()

    def connect(self) -> int:
        """Open the next stream after the consumer has introduced itself."""
        self.wait(lambda: self._consumer_hello is not None)
        self._streams += 1
        stream = self._streams
        self._call(lambda: self._connect(stream))
        return stream

    def cut(self, stream: int) -> None:
        """Cut the stream. Both ends notice it."""
        self._call(lambda: self._close(stream, "cut"))

    def say(self, stream: int, message: AnyMessage, *, to_consumer: bool) -> None:
        """Send a message that the other end would not send by itself."""
        self._call(lambda: self._sockets[to_consumer].send(PairMessage(stream, message)))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until a message makes the condition true."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S)

    # On the pump's thread

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake_up.wake()

    def _stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_up, select.POLLIN)
        for sock in self._sockets.values():
            poll.register(sock, select.POLLIN)
        while not self._stopped:
            poll.poll()
            self._wake_up.clear()
            for as_consumer, sock in list(self._sockets.items()):
                try:
                    messages = sock.receive()
                except PeerGone:
                    poll.unregister(sock)
                    self._sockets.pop(as_consumer).close()
                    with self._changed:
                        for stream in list(self.open):
                            self._close(stream, "the engine has ended")
                    continue
                with self._changed:
                    for message in messages:
                        self._take(message, as_consumer=as_consumer)
                    self._changed.notify_all()
            with self._changed:
                while self._calls:
                    self._calls.popleft()()
                self._changed.notify_all()

    def _connect(self, stream: int) -> None:
        assert self._consumer_hello is not None
        self.open.add(stream)
        hello = _through_protobuf(self._consumer_hello, as_consumer=True)
        assert isinstance(hello, PairHello)
        self._sockets[False].send(PairOpened(stream, hello, as_consumer=False))

    def _take(self, message: PairOutput, *, as_consumer: bool) -> None:
        match message:
            case LocalHello(hello):
                self._consumer_hello = hello
            case SendMessage(stream, PairHello() as hello) if stream in self.open:
                answer = _through_protobuf(hello, as_consumer=False)
                assert isinstance(answer, PairHello)
                self._sockets[True].send(PairOpened(stream, answer, as_consumer=True))
            case SendMessage(stream, said) if stream in self.open:
                heard = _through_protobuf(said, as_consumer=as_consumer)
                assert not isinstance(heard, PairHello)
                self.sent.append(heard)
                self._send(not as_consumer, PairMessage(stream, heard))
            case EngineHeartbeat(late_s=late_s):
                self.beats[as_consumer] += 1
                self.late_s[as_consumer] = late_s
            case EndStream(stream, reason):
                self.ended[stream] = message
                self._close(stream, reason)

    def _close(self, stream: int, reason: str) -> None:
        if stream in self.open:
            self.open.remove(stream)
            for as_consumer in (True, False):
                self._send(as_consumer, PairClosed(stream, reason))

    def _send(self, as_consumer: bool, message: PairInput) -> None:
        with contextlib.suppress(KeyError):  # that node has ended
            self._sockets[as_consumer].send(message)


def _input_socket(sock: socket.socket) -> FrameSocket[PairInput]:
    return FrameSocket(sock, PairInput)


def _through_protobuf(
    record: PairHello | AnyMessage, *, as_consumer: bool
) -> PairHello | AnyMessage:
    proto = codec.to_proto(record, as_consumer=as_consumer)
    return codec.parse(type(proto).FromString(proto.SerializeToString()))
