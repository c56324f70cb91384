"""The relay between rank 0 and the rank hosts: `python -m node.hosts.relay DESCRIPTORS SERVER`.

Only rank 0 starts it. DESCRIPTORS are its sockets to rank 0, one for each rank on another host.
Packets of rank 0 to the first of these ranks go to all, with the tensors of steps. Packets of a
rank go to its socket. SERVER is the ServerConfig as JSON.

Each rank host has one stream. The end of any stream ends this process, and with it the node. The
node has failed if rank 0 closes its sockets without EndRanks.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from common import VERSION, logs, rpc, tls
from common.config import EngineConfig, ServerConfig
from common.errors import (
    ConfigError,
    DeadlineExceeded,
    FailedPrecondition,
    NodeUnavailable,
    ProtocolViolation,
    ServingError,
)
from common.identity.guard import node_name, uncounted
from common.identity.program import guard_of, identity_of
from common.logs import kv
from common.process.network import own_address
from common.rpc.streams import ORDERLY_END, said
from engine.ranks.meeting import NETWORK
from engine.ranks.messages import (
    MAX_PACKET_BYTES,
    CaptureGraph,
    EndRanks,
    FromFollower,
    Ping,
    RankFailed,
    RankJob,
    SampleStep,
    StartRank,
    StartSteps,
    StepHeader,
    ToFollower,
)
from engine.ranks.ring import StepRing
from node.hosts.packets import PacketSocket
from protos import last_words_pb2, ranks_pb2, ranks_pb2_grpc

_JOIN_S = 10.0  # from the opening of a stream to its first message
_STREAMS_S = 1.0  # for streams to send their error at the end
_PART_BYTES = 1 << 20
_MAX_MESSAGE_BYTES = MAX_PACKET_BYTES + 1024
_PORT = "--engine.parallel.listen-port"

log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_start: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFollower)
_running: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    StepHeader | SampleStep | CaptureGraph | EndRanks | Ping | RankJob
)
_reply: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromFollower)


class HostWriter:
    """The stream to a rank host. Several tasks may write: gRPC allows one write at a time."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._writing = asyncio.Lock()

    async def write(self, message: ranks_pb2.LeaderMessage) -> None:
        async with self._writing:
            await self._context.write(message)

    async def end(self, words: last_words_pb2.LastWords) -> None:
        """Send the reason for the end of the stream, if the host still reads."""
        with contextlib.suppress(grpc.aio.BaseError, TimeoutError):
            async with asyncio.timeout(_STREAMS_S):
                await self.write(ranks_pb2.LeaderMessage(last_words=words))


@dataclass(frozen=True, slots=True, eq=False)
class RankHost:
    """A rank host that has joined.

    Attributes:
        number: from 1 on.
    """

    number: int
    ranks: range
    peer: str
    writer: HostWriter


class Relay(ranks_pb2_grpc.RanksServicer):
    """The Ranks service, and the forwarding of rank 0's packets. Event loop only.

    Args:
        sockets: to rank 0, by rank on other hosts.
        start: rank 0's StartRank for the first of these ranks.
    Attributes:
        over: why the node ends. None: rank 0 has ended it gracefully.
    """

    def __init__(
        self, sockets: Mapping[int, PacketSocket], config: EngineConfig, start: StartRank
    ) -> None:
        self.over: asyncio.Future[RankFailed | None] = asyncio.get_running_loop().create_future()
        self._sockets = sockets
        self._parallel = config.parallel
        self._start = start
        self._hosts: list[RankHost] = []
        self._complete = asyncio.Event()
        self._started = asyncio.Event()
        self._ring: StepRing | None = None  # None: no step yet
        self._number = 0  # number of the next step

    async def Follow(self, messages: AsyncIterator[ranks_pb2.HostMessage], context: Any) -> None:
        """Run the ranks of one host until either side ends the stream, which ends the node."""
        writer = HostWriter(context)
        try:
            host = self._joined(await _first(messages), context.peer(), writer)
            await self._serve(host, messages)
            await writer.end(ORDERLY_END)
        except ServingError as error:
            await writer.end(said(error))
            raise

    async def _serve(self, host: RankHost, messages: AsyncIterator[ranks_pb2.HostMessage]) -> None:
        reading = asyncio.ensure_future(self._read(host, messages))
        try:
            either: set[asyncio.Future[Any]] = {reading, self.over}
            await asyncio.wait(either, return_when="FIRST_COMPLETED")
            if reading.done():
                self._fail(_lost(host, reading.exception()))
        except asyncio.CancelledError:
            self._fail(_lost(host, None))
            raise
        finally:
            reading.cancel()
        if failure := self.over.result():
            raise NodeUnavailable(failure.error)

    def _joined(self, join: ranks_pb2.JoinNode, peer: str, writer: HostWriter) -> RankHost:
        """Assign ranks to a host. Raises FailedPrecondition if it cannot be part of this node."""
        if join.version != VERSION:
            raise FailedPrecondition(
                f"this node is Baton {VERSION}, and the rank host is {join.version[:32]!r}"
            )
        if len(self._hosts) == self._parallel.hosts - 1:
            raise FailedPrecondition(
                f"all {self._parallel.hosts} hosts of this node have joined already"
            )
        number, each = len(self._hosts) + 1, self._parallel.ranks_per_host
        host = RankHost(number, range(number * each, (number + 1) * each), peer, writer)
        self._hosts.append(host)
        ranks = f"{host.ranks[0]}-{host.ranks[-1]}"
        log.info("host has joined %s", kv(host=number, peer=peer, ranks=ranks))
        if number == self._parallel.hosts - 1:
            self._complete.set()
        return host

    async def _read(self, host: RankHost, messages: AsyncIterator[ranks_pb2.HostMessage]) -> None:
        """Forward the packets of a host's ranks."""
        await self._started.wait()
        async for message in messages:
            if not message.HasField("packet"):
                raise ProtocolViolation("the rank host sent a second join message")
            rank, packet = message.packet.rank, message.packet.packet
            if rank not in host.ranks or not 0 < len(packet) <= MAX_PACKET_BYTES:
                raise ProtocolViolation(
                    f"a packet of {len(packet)} bytes of rank {rank}: this host may send at most "
                    f"{MAX_PACKET_BYTES} bytes, of ranks {host.ranks[0]} to {host.ranks[-1]}"
                )
            try:
                reply = _reply.decode(packet)
            except msgspec.DecodeError as error:
                raise ProtocolViolation(f"rank {rank} sent an invalid message: {error}") from error
            if isinstance(reply, RankFailed):
                self._end(reply)
            else:
                await self._sockets[rank].send(packet)

    async def pass_on(self) -> None:
        """Forward the packets of rank 0 until the node ends."""
        first = next(iter(self._sockets.values()))
        try:
            while not self.over.done():
                packet, files = await first.receive()
                if not packet:
                    self._fail("rank 0 has failed")
                    return
                await self._started.wait()
                for message in self._messages(packet, files):
                    for host in self._hosts:
                        await host.writer.write(message)
        except Exception as error:  # noqa: BLE001  the end of the node
            self._fail(f"a message does not reach all hosts: {type(error).__name__}: {error}"[:600])

    async def start_hosts(self) -> None:
        """Start the ranks of all hosts when all have joined, or end the node."""
        seconds = self._parallel.join_timeout_s
        try:
            async with asyncio.timeout(seconds):
                await self._complete.wait()
        except TimeoutError:
            there = f"{len(self._hosts) + 1} of {self._parallel.hosts} hosts"
            self._fail(f"only {there} have joined this node within {seconds:g} s")
            return
        for host in self._hosts:
            start = ranks_pb2.HostStart(
                first_rank=host.ranks[0], config=self._start.config, store=self._start.store
            )
            try:
                await host.writer.write(ranks_pb2.LeaderMessage(start=start))
            except Exception as error:  # noqa: BLE001  the end of the node
                self._fail(_lost(host, error))
        self._started.set()

    def _messages(self, packet: bytes, files: Sequence[int]) -> Iterator[ranks_pb2.LeaderMessage]:
        ring = self._ring
        header = (_start if ring is None else _running).decode(packet)
        if ring is not None and isinstance(header, StepHeader):
            block = ring.block(self._number)[: header.block_bytes]
            self._number += 1
            yield from _step(packet, block)
            return
        if isinstance(header, EndRanks):
            self._end(None)
            return
        if isinstance(header, StartSteps):
            self._ring = StepRing(files[0], header.block_bytes)
            os.close(files[0])
        yield ranks_pb2.LeaderMessage(packet=packet)

    def _fail(self, reason: str) -> None:
        self._end(RankFailed(reason, config=False))

    def _end(self, failure: RankFailed | None) -> None:
        """End the node. Only the first reason counts."""
        if not self.over.done():
            self.over.set_result(failure)


def _step(header: bytes, block: NDArray[np.uint8]) -> Iterator[ranks_pb2.LeaderMessage]:
    """Yield the messages of a step, whose tensors are split into parts."""
    for start in range(0, max(1, len(block)), _PART_BYTES):
        end = start + _PART_BYTES
        tensors, last = block[start:end].tobytes(), end >= len(block)
        part = ranks_pb2.StepPart(offset=start, tensors=tensors, header=header if last else b"")
        yield ranks_pb2.LeaderMessage(step=part)


async def _first(messages: AsyncIterator[ranks_pb2.HostMessage]) -> ranks_pb2.JoinNode:
    try:
        async with asyncio.timeout(_JOIN_S):
            async for message in messages:
                if message.HasField("join"):
                    return message.join
                break
    except TimeoutError:
        raise DeadlineExceeded(f"the rank host did not join within {_JOIN_S:g} s") from None
    raise ProtocolViolation("the first message of the rank host is not its join message")


def _lost(host: RankHost, error: BaseException | None) -> str:
    """Return the reason for the node's end after the loss of a host."""
    reason = "" if error is None else f": {error}"
    return f"host {host.number} ({host.peer}) is lost{reason}"


async def serve(
    packets: Sequence[socket.socket],
    server: ServerConfig,
    on_start: Callable[[StartRank], None] = lambda start: None,
) -> int:
    """Relay until the node ends. Returns the exit code.

    Args:
        packets: sockets to rank 0, for each rank on other hosts in order. Owned by this call.
        on_start: called with rank 0's first message.
    """
    with contextlib.ExitStack() as stack:
        first, *others = [stack.enter_context(PacketSocket(each)) for each in packets]
        packet, _ = await first.receive()
        if not packet:
            return 0
        start: StartRank = _start.decode(packet)
        on_start(start)
        return await _relay(dict(enumerate([first, *others], start.rank)), start, server)


async def _relay(
    sockets: Mapping[int, PacketSocket], start: StartRank, server: ServerConfig
) -> int:
    config = EngineConfig.model_validate_json(start.config)
    relay = Relay(sockets, config, start)
    try:
        listening = await _listen(relay, config, server)
    except ConfigError as error:
        await _send_all(sockets, RankFailed(str(error), config=True))
        return 2
    work = [asyncio.ensure_future(each) for each in (relay.pass_on(), relay.start_hosts())]
    failure = await relay.over
    if failure is not None:
        log.error("a host has ended, and so does this node %s", kv(reason=failure.error))
        await _send_all(sockets, failure)
    await rpc.stop(listening, _STREAMS_S)
    for each in work:
        each.cancel()
    return 0 if failure is None else 1


async def _send_all(sockets: Mapping[int, PacketSocket], failure: RankFailed) -> None:
    """Report a failure on every rank's socket, because rank 0 waits for one after the other."""
    for each in sockets.values():
        await each.send(_encoder.encode(failure))


async def _listen(relay: Relay, config: EngineConfig, server: ServerConfig) -> grpc.aio.Server:
    """Listen for rank hosts, at this host's address in the trusted network.

    Raises:
        ConfigError: the address is not available, or rank hosts would not have to authenticate.
    """
    parallel = config.parallel
    if parallel.trusted_network is None:
        raise ConfigError(f"{NETWORK} is missing")
    host = own_address(parallel.trusted_network, NETWORK).host
    certificates = tls.certificates(server.tls, "--server.tls")
    identity = identity_of("node", node_name(secrets.randbits(64)), server.secret_file)
    guard = guard_of(server.model_copy(update={"host": host}), identity, certificates, uncounted)
    listening = rpc.make_server(rpc.NODE_SERVER_OPTIONS, max_message_bytes=_MAX_MESSAGE_BYTES)
    rpc.add_service(listening, ranks_pb2_grpc.add_RanksServicer_to_server, relay, guard)
    port = rpc.bind(listening, host, parallel.listen_port, certificates, flag=_PORT)
    await listening.start()
    fields = {"address": rpc.join_address(host, port), "hosts": parallel.hosts - 1}
    secret = "off" if identity is None else "on"
    log.info("waiting for hosts %s", kv(**fields, tls=tls.kind(certificates), secret=secret))
    return listening


def main(descriptors: str, server: str) -> int:
    # Both signals may be sent to the whole process group. Only rank 0 decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    packets = []
    for descriptor in map(int, descriptors.split(",")):
        os.set_inheritable(descriptor, False)
        packets.append(socket.socket(fileno=descriptor))

    def set_up(start: StartRank) -> None:
        logs.setup("hosts", start.log_level, start.log_format)

    return uvloop.run(serve(packets, ServerConfig.model_validate_json(server), set_up))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
