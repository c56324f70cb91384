"""The producer's side of KvTransfer: serves pair streams that consumers open."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

import grpc.aio

from common import rpc
from common.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NodeUnavailable,
    ProtocolViolation,
)
from common.identity.guard import CallAuthenticator, Caller, node_name
from kvtransfer.messages import HandoffFailed
from kvtransfer.pairing import PairHello
from kvtransfer.pairs import codec
from kvtransfer.pairs.streams import PairStream, PairStreams
from protos import kvtransfer_pb2, kvtransfer_pb2_grpc

HELLO_S = 5.0


class PairService(kvtransfer_pb2_grpc.KvTransferServicer):
    """The KvTransfer service. Event loop only.

    Args:
        check_ready: raises NodeUnavailable until the engine can pair.
        check_length: raises InvalidRequest if this number of tokens can never be served.
        on_named: called with the addresses of other nodes that have part of a prompt, as its
            consumer reports them.
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
        consumer is incompatible (with every field that differs) or breaks the protocol (with a
        sentence). PERMISSION_DENIED if it uses another caller's instance id. DEADLINE_EXCEEDED if
        it sends no Hello.
        """
        self._check_ready()
        if self._draining:
            raise NodeUnavailable("this node is draining")
        hello = await self._first(messages)
        _check_instance(hello, context.caller)
        with self._streams.opened(hello, as_consumer=False) as stream:
            await stream.outgoing.converse(context.write, messages, partial(self._take, stream))

    def drain(self) -> None:
        """Accept no new stream from now on. Hand-offs on open streams finish."""
        self._draining = True

    def resume(self) -> None:
        """Accept new streams again."""
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
        prompt = message.open.prompt  # parsed by now, so they are addresses
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
    """Raise Forbidden unless the instance is the caller's own: hand-offs and data keys depend on
    it.
    """
    if caller.name is not None and caller.name != node_name(hello.instance):
        raise Forbidden(
            f"Hello is of instance {node_name(hello.instance)}, the token of {caller.name[:100]!r}"
        )
