"""The pair streams between the nodes of a PairRig, without gRPC.

Every record is sent as the bytes of its protobuf message. A test may hold back messages of a kind,
and cut streams on one side or on both.
"""

import itertools
import select
import socket
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from common.process.ipc import FrameSocket
from kvtransfer.frontend_messages import (
    EndStream,
    LocalHello,
    PairClosed,
    PairInput,
    PairMessage,
    PairOpened,
    PairOutput,
    SendMessage,
)
from kvtransfer.messages import AnyMessage, Heartbeat, PagesReady
from kvtransfer.pairing import PairHello
from kvtransfer.pairs import codec
from protos import kvtransfer_pb2

BOTH = ("consumer", "producer")


@dataclass(eq=False)
class FrontEnd:
    """The pair streams of one node's server process."""

    address: str
    is_producer: bool
    is_consumer: bool
    frames: FrameSocket[PairOutput]
    hello: PairHello | None = None  # that this node sends as a consumer
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1))
    lines: dict[int, "_Line"] = field(default_factory=dict)  # open, by this frontend's number

    def send(self, message: PairInput) -> None:
        self.frames.send(message)


@dataclass(eq=False)
class _Line:
    """One pair stream: its number at each open end, and the messages in flight."""

    producer: FrontEnd
    consumer: FrontEnd
    numbers: dict[FrontEnd, int] = field(default_factory=dict)
    under_way: dict[FrontEnd, deque[AnyMessage]] = field(default_factory=dict)  # by receiver
    over: bool = False  # for the consumer, which may then dial again

    def __post_init__(self) -> None:
        self.under_way = {self.producer: deque(), self.consumer: deque()}

    def other(self, front: FrontEnd) -> FrontEnd:
        return self.consumer if front is self.producer else self.producer


class Wires:
    """The network: joins every consumer to every producer. Used by the test's thread only."""

    def __init__(self) -> None:
        self._fronts: list[FrontEnd] = []
        self._lines: list[_Line] = []
        self._held_back: set[type] = set()
        self._cut_off: set[tuple[FrontEnd, FrontEnd]] = set()
        self._refused: set[tuple[FrontEnd, FrontEnd]] = set()
        self.num_begun = 0  # streams since the start
        self.seen: list[AnyMessage] = []  # messages that have arrived, without heartbeats

    def add(
        self, sock: socket.socket, address: str, *, is_producer: bool, is_consumer: bool = True
    ) -> FrontEnd:
        """Add a node. `sock` leads to its transfer thread."""
        front = FrontEnd(address, is_producer, is_consumer, FrameSocket(sock, PairOutput))
        self._fronts.append(front)
        return front

    def said(self, kind: type) -> list[Any]:
        """Return the messages of this kind that have arrived."""
        return [message for message in self.seen if isinstance(message, kind)]

    def register(self, poll: select.poll) -> None:
        for front in self._fronts:
            poll.register(front.frames, select.POLLIN)

    # Faults ---------------------------------------------------------------------------------------

    def hold_back(self, *kinds: type) -> None:
        """Hold back messages of these kinds, and all messages behind them on their streams."""
        self._held_back.update(kinds)

    def release(self) -> None:
        self._held_back.clear()

    def cut(
        self,
        producer: FrontEnd,
        consumer: FrontEnd,
        sides: Collection[str] = BOTH,
        *,
        engine_died: bool = False,
    ) -> None:
        """End the stream of this pair. Its messages in flight are lost, and only `sides` notice. No
        new stream begins before `heal`.

        Args:
            engine_died: report to the consumer that the producer's engine has crashed.
        """
        self._cut_off.add((consumer, producer))
        for line in self._lines:
            if (line.consumer, line.producer) == (consumer, producer):
                self._end(line, "cut by the test", sides, engine_died=engine_died)

    def heal(self) -> None:
        self._cut_off.clear()

    # Delivery -------------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Deliver all messages that are not held back. Return whether there were any."""
        moved = False
        for front in self._fronts:
            for output in front.frames.receive():
                moved = True
                self._take(front, output)
        for consumer, producer in itertools.product(self._fronts, self._fronts):
            joined = consumer.is_consumer and producer.is_producer and consumer is not producer
            if joined and consumer.hello is not None:
                self._dial(consumer, consumer.hello, producer)
        for line in self._lines:
            for front in line.numbers:
                moved |= self._deliver(line, front)
        self._lines = [line for line in self._lines if line.numbers]
        return moved

    def close(self) -> None:
        for front in self._fronts:
            front.frames.close()

    def _take(self, front: FrontEnd, output: PairOutput) -> None:
        match output:
            case LocalHello(hello):
                front.hello = _across(hello, as_consumer=True)
            case SendMessage(number, PairHello() as hello):
                line = front.lines.get(number)
                if line is not None and line.consumer not in line.numbers:
                    self._open(line, line.consumer, _across(hello, as_consumer=False))
            case SendMessage(number, message):
                line = front.lines.get(number)
                if line is not None:
                    reported = _across(message, as_consumer=front is line.consumer)
                    line.under_way[line.other(front)].append(reported)
            case EndStream(number, reason, refused):
                line = front.lines.get(number)
                if line is not None:
                    if refused:
                        self._refused.add((line.consumer, line.producer))
                    self._end(line, reason, BOTH)

    def _dial(self, consumer: FrontEnd, hello: PairHello, producer: FrontEnd) -> None:
        pair = (consumer, producer)
        paired = any(
            (line.consumer, line.producer) == pair and not line.over for line in self._lines
        )
        if paired or pair in self._cut_off or pair in self._refused:
            return
        self.num_begun += 1
        line = _Line(producer, consumer)
        self._lines.append(line)
        self._open(line, producer, hello)

    def _open(self, line: _Line, front: FrontEnd, hello: PairHello) -> None:
        number = next(front.numbers)
        line.numbers[front] = number
        front.lines[number] = line
        if front is line.consumer:
            hello = msgspec.structs.replace(hello, address=line.producer.address)
        front.send(PairOpened(number, hello, front is line.consumer))

    def _deliver(self, line: _Line, receiver: FrontEnd) -> bool:
        queue, moved = line.under_way[receiver], False
        while queue and type(queue[0]) not in self._held_back:
            message = queue.popleft()
            receiver.send(PairMessage(line.numbers[receiver], message))
            moved = True
            if not isinstance(message, Heartbeat):
                self.seen.append(message)
        return moved

    def _end(
        self, line: _Line, reason: str, sides: Collection[str], *, engine_died: bool = False
    ) -> None:
        line.over |= "consumer" in sides or line.consumer not in line.numbers
        for side, front in (("consumer", line.consumer), ("producer", line.producer)):
            line.under_way[front].clear()
            if side in sides and front in line.numbers:
                number = line.numbers.pop(front)
                del front.lines[number]
                front.send(PairClosed(number, reason, engine_died and side == "consumer"))


def forge_first_tokens(
    monkeypatch: pytest.MonkeyPatch, forge: Callable[[kvtransfer_pb2.Ready], object]
) -> None:
    """Let `forge` change each message with a first token before a prefill node sends it."""
    honest = codec._ready_proto

    def forged(ready: PagesReady) -> kvtransfer_pb2.Ready:
        message = honest(ready)
        if message.last:
            forge(message)
        return message

    monkeypatch.setattr(codec, "_ready_proto", forged)


def _across(record, *, as_consumer: bool):
    """Return the record as the peer parses it."""
    kind = kvtransfer_pb2.FromConsumer if as_consumer else kvtransfer_pb2.FromProducer
    sent = codec.to_proto(record, as_consumer=as_consumer).SerializeToString()
    return codec.parse(kind.FromString(sent))
