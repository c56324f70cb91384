"""Why a server ends a stream both ways, as the last message on it.

The status that follows says the same, but may never be told: where a write of the client fails
because the stream has just ended, grpc.aio makes INTERNAL of whatever the status was. Messages it
does not lose. So a client that writes leaves it to who reads why a stream is over, and who reads
believes the last words before the status.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from common.errors import ProtocolViolation, ServingError, cut
from protos import last_words_pb2

_OF_A_FAILED_WRITE = "Internal error from Core"  # grpc.aio's own words
_NOT_TOLD = "the stream ended while something was said on it, and its status was lost"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamEnded(Exception):
    """By the server, or by what became of the connection to it."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(f"{code.name}: {sentence}")
        self.code = code
        self.sentence = sentence


def said(error: ServingError) -> last_words_pb2.LastWords:
    return last_words_pb2.LastWords(code=error.status.value[0], sentence=str(error))


async def heard(call: Any) -> AsyncIterator[Any]:
    """What a server says on a stream whose messages have `last_words`, but for these.

    Ends where the server ends the stream without an error.
    Raises:
        ProtocolViolation: it has sent bytes that are no message.
        StreamEnded: any other end.
    """
    end: StreamEnded | None = None
    try:
        # Not `call.read`: that reads nothing more once a write has failed.
        async for message in call:
            if message is None:  # what grpcio makes of bytes that it cannot parse
                raise ProtocolViolation("the node has sent bytes that are no message")
            if message.HasField("last_words"):
                words = message.last_words
                end = StreamEnded(
                    _CODES.get(words.code, grpc.StatusCode.UNKNOWN), cut(words.sentence)
                )
            elif end is None:
                yield message
    except grpc.aio.AioRpcError as error:
        raise end or _as_told(error) from error
    if end is not None:
        raise end


def _as_told(error: grpc.aio.AioRpcError) -> StreamEnded:
    sentence = error.details() or ""
    return StreamEnded(error.code(), _NOT_TOLD if sentence == _OF_A_FAILED_WRITE else sentence)
