"""Messages between a node's frontend and its transfer thread, over a dedicated socket.

The frontend keeps no state of hand-offs. It numbers the pair streams of both directions with one
counter, never reuses a number, and forwards what `pairs/codec.py` has parsed. A stream is opened
like this:

    consumer's frontend                   producer's frontend
      sends LocalHello.hello  ---Hello--> PairOpened(stream, hello, as_consumer=False)
                                          waits for SendMessage of that stream with its
      PairOpened(stream, hello,   <-Hello-- Hello (or for EndStream)
                 as_consumer=True)

The producer waits at most 5 s for the consumer's Hello, and the consumer 15 s for the producer's.
The frontend holds messages of a stream until PairOpened has been sent to the transfer thread.
"""

from typing import TypeAlias

import msgspec

from kvtransfer.messages import AnyMessage
from kvtransfer.pairing import PairHello

# Frontend to transfer thread


class PairOpened(msgspec.Struct, frozen=True, tag=True):
    """A pair stream on which the peer's Hello has arrived."""

    stream: int
    hello: PairHello
    as_consumer: bool  # whether this node is the consumer of the pair


class PairMessage(msgspec.Struct, frozen=True, tag=True):
    stream: int
    message: AnyMessage


class PairClosed(msgspec.Struct, frozen=True, tag=True):
    """The end of a stream, by either side. No message about the stream follows."""

    stream: int
    reason: str
    engine_died: bool = False  # whether the peer's engine died


PairInput: TypeAlias = PairOpened | PairMessage | PairClosed

# Transfer thread to frontend


class LocalHello(msgspec.Struct, frozen=True, tag=True):
    """The Hello that this node sends as a consumer. It is the first message on the socket, because
    pairing needs it, and is sent again when the weight version changes.
    """

    hello: PairHello


class SendMessage(msgspec.Struct, frozen=True, tag=True):
    """A message to send on a stream. A producer sends its Hello first, with paths for that
    consumer.
    """

    stream: int
    message: PairHello | AnyMessage


class EndStream(msgspec.Struct, frozen=True, tag=True):
    """A request to end the stream now. Messages sent before may be lost. If this node is the
    consumer, it dials again later. The sender ignores further input of the stream.

    Attributes:
        refused: the nodes are incompatible or the peer has broken the protocol, so an immediate
            retry is useless (FAILED_PRECONDITION). Otherwise the status is UNAVAILABLE.
    """

    stream: int
    reason: str
    refused: bool


class EngineHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat of the engine, once a second.

    The transfer thread sends it, because the engine thread may be in a step. Heartbeats stop while
    the engine is late by more than `stall_s`.
    """

    late_s: float  # seconds by which the engine's next progress is overdue


PairOutput: TypeAlias = LocalHello | SendMessage | EndStream | EngineHeartbeat
