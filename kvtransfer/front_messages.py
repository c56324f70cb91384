"""What crosses between a node's front and its transfer thread, over a socket of their own.

The front keeps no books. It numbers the pair streams of both directions with one counter, never
reuses a number, and forwards what `pairs/codec.py` has parsed. How a stream begins:

    reader's front                      owner's front
    sends LocalHello.hello  ---Hello--> PairOpened(stream, hello, as_reader=False)
                                        waits for PairHello (or PairEnd) of that stream
    PairOpened(stream, hello,   <-Hello-- sends PairHello.hello
               as_reader=True)

Each end gives up on a Hello that has not come after 5 s. Messages wait in the front until the
stream has been opened to the transfer thread.
"""

from typing import TypeAlias

import msgspec

from kvtransfer.messages import AnyMessage
from kvtransfer.pairing import Hello

# Front to transfer thread -----------------------------------------------------------------------


class PairOpened(msgspec.Struct, frozen=True, tag=True):
    """The peer's Hello has come."""

    stream: int
    hello: Hello
    as_reader: bool  # whether this node is the reader of the pair


class PairMessage(msgspec.Struct, frozen=True, tag=True):
    stream: int
    message: AnyMessage


class PairClosed(msgspec.Struct, frozen=True, tag=True):
    """The stream is over, whoever ended it. Nothing about it follows."""

    stream: int
    reason: str
    engine_died: bool = False  # the peer's


PairInput: TypeAlias = PairOpened | PairMessage | PairClosed

# Transfer thread to front -----------------------------------------------------------------------


class LocalHello(msgspec.Struct, frozen=True, tag=True):
    """What this node says first where it is the reader: pairing may begin. Sent first, and again
    when it computes with other weights."""

    hello: Hello


class PairHello(msgspec.Struct, frozen=True, tag=True):
    """The owner's answer on this stream: its paths, described for this reader."""

    stream: int
    hello: Hello


class PairSend(msgspec.Struct, frozen=True, tag=True):
    stream: int
    message: AnyMessage


class PairEnd(msgspec.Struct, frozen=True, tag=True):
    """End the stream now; what was sent before may be lost. A dialer redials after a while."""

    stream: int
    reason: str
    refused: bool  # FAILED_PRECONDITION: mismatch or violation; else UNAVAILABLE


class EngineBeat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat of the engine. The transfer thread sends it once a second, since the engine
    thread may be in a step, and stops while the engine is later than `stall_s`."""

    late_s: float  # seconds by which the engine's next progress is overdue


PairOutput: TypeAlias = LocalHello | PairHello | PairSend | PairEnd | EngineBeat
