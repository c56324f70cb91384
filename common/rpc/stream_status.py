"""Reason of the end of a bidirectional stream, sent by the server as the last message.

The status that follows has the same content but may be lost: if a client's write fails because the
stream has just ended, grpc.aio replaces any status by INTERNAL. Messages are not lost. So a writing
client gets the reason from its reader, and the reader prefers the last message to the status.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from common.errors import ProtocolViolation, ServingError, cut
from protos import last_words_pb2

_OF_A_FAILED_WRITE = "Internal error from Core"  # text of grpc.aio
_NOT_TOLD = "the stream ended while something was said on it, and its status was lost"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamStatus(Exception):
    """The stream was ended by the server or by a connection failure."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(f"{code.name}: {sentence}")
        self.code = code
        self.sentence = sentence


def said(error: ServingError) -> last_words_pb2.LastWords:
    return last_words_pb2.LastWords(code=error.status.value[0], sentence=str(error))


async def heard(call: Any) -> AsyncIterator[Any]:
    """Yield the server's messages except `last_words`, which end in StreamStatus.

    Ends when the server ends the stream without an error.

    Raises:
        ProtocolViolation: the server has sent a malformed message.
        StreamStatus: any other end.
    """
    end: StreamStatus | None = None
    try:
        # `call.read` would read nothing after a failed write.
        async for message in call:
            if message is None:  # grpcio returns None for bytes that it cannot parse
                raise ProtocolViolation("the node has sent bytes that are no message")
            if message.HasField("last_words"):
                words = message.last_words
                end = StreamStatus(
                    _CODES.get(words.code, grpc.StatusCode.UNKNOWN), cut(words.sentence)
                )
            elif end is None:
                yield message
    except grpc.aio.AioRpcError as error:
        raise end or _as_told(error) from error
    if end is not None:
        raise end


def _as_told(error: grpc.aio.AioRpcError) -> StreamStatus:
    sentence = error.details() or ""
    return StreamStatus(error.code(), _NOT_TOLD if sentence == _OF_A_FAILED_WRITE else sentence)
