"""`baton rank-host`: runs the ranks of a node on a host other than its first one.

It joins the node at its first host, the leader, gets the configuration and its ranks, and starts
the ranks as child processes, which end with it. It forwards packets between the leader and the
ranks. The tensors of a step come with it, into memory that the ranks share.

If a rank or the stream to the leader ends, all ranks and this process end too: with exit code 0 if
the leader ended the node, 2 if the user must fix the configuration, else 1.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import msgspec
import numpy as np
import uvloop
from pydantic import ValidationError

from common import VERSION, logs, rpc, settings, tls
from common.config import EngineConfig, RankHostConfig
from common.errors import ConfigError, NodeUnavailable, ProtocolViolation, ServingError
from common.identity.guard import node_name
from common.identity.program import identity_of, is_loopback
from common.logs import kv
from common.process.network import own_address
from common.process.waiting import first_of
from common.rpc.streams import StreamStatus, heard
from engine.ranks.forking import HELLO
from engine.ranks.meeting import NETWORK
from engine.ranks.messages import RankFailed, StartRank, StartSteps, ToFollower
from engine.ranks.processes import RankProcess, start_ranks
from engine.ranks.ring import StepRing, ring_memory
from node.hosts.packets import PacketSocket
from protos import ranks_pb2, ranks_pb2_grpc

_AGAIN_S = 1.0  # between two attempts to join
_LAST_WORDS_S = 2.0  # for the leader to read the last messages
_END_S = 5.0  # for ranks to end
_MISCONFIGURED = 2  # exit code
_CREDENTIALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_REFUSALS = {*_CREDENTIALS, grpc.StatusCode.FAILED_PRECONDITION}

log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_start: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFollower)


class LeaderStream:
    """The gRPC stream to the leader.

    Args:
        call: the Follow call.
        messages: of the leader after its first one, see `heard`.
    """

    def __init__(self, call: Any, messages: AsyncIterator[ranks_pb2.LeaderMessage]) -> None:
        self._call = call
        self._messages = messages
        self._next: asyncio.Future[ranks_pb2.LeaderMessage | None] | None = None
        self._writing = asyncio.Lock()

    async def read(self) -> ranks_pb2.LeaderMessage | None:
        """Return the leader's next message, or None after the last one.

        A cancelled read leaves its message to the next one: gRPC would cancel the stream with it,
        and with the stream the packets that the leader has not read yet.

        Raises:
            StreamStatus, ProtocolViolation: see `heard`.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._messages, None))
        message = await asyncio.shield(self._next)
        self._next = None
        return message

    async def send(self, rank: int, packet: bytes) -> None:
        """Send a packet of a rank. No effect if the stream has ended, which its reader notices."""
        message = ranks_pb2.HostMessage(packet=ranks_pb2.RankPacket(rank=rank, packet=packet))
        async with self._writing:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.write(message)

    async def close(self) -> None:
        """End the stream when the leader has read all packets."""
        with contextlib.suppress(
            grpc.aio.AioRpcError, asyncio.InvalidStateError, StreamStatus, TimeoutError
        ):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._call.done_writing()
                while await self.read() is not None:
                    pass
        self._call.cancel()
        if self._next is not None:
            self._next.cancel()


async def join(config: RankHostConfig, stub: Any) -> tuple[LeaderStream, ranks_pb2.HostStart]:
    """Join the node once its leader listens, and wait for its other hosts.

    Raises:
        ConfigError: the leader rejects the credentials, or this host has none.
        NodeUnavailable: the leader rejects this host, or does not listen in time.
    """
    reason = "it was not reached"
    try:
        async with asyncio.timeout(config.join_timeout_s):
            while True:
                call = stub.Follow()
                try:
                    return await _started(call)
                except StreamStatus as ended:
                    if ended.code in _CREDENTIALS:
                        raise ConfigError(
                            f"the leader {config.leader} rejected this host: {ended}"
                        ) from ended
                    if ended.code in _REFUSALS:
                        refusal = f"the leader {config.leader} rejected this host: {ended.sentence}"
                        raise NodeUnavailable(refusal) from ended
                    reason = str(ended)
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError:
        seconds = config.join_timeout_s
        raise NodeUnavailable(
            f"no leader at {config.leader} within {seconds:g} s: {reason}"
        ) from None


async def _started(call: Any) -> tuple[LeaderStream, ranks_pb2.HostStart]:
    with contextlib.suppress(grpc.aio.AioRpcError):  # its reason is read below
        await call.write(ranks_pb2.HostMessage(join=ranks_pb2.JoinNode(version=VERSION)))
    messages = heard(call)
    async for message in messages:
        if not message.HasField("start"):
            raise ProtocolViolation("the first message of the leader is not its start")
        return LeaderStream(call, messages), message.start
    raise StreamStatus(grpc.StatusCode.UNAVAILABLE, "the stream ended at once")


class HostRanks:
    """The ranks of this host, by rank. Created on the main thread, because they end with the thread
    that started them.

    Args:
        config: config of the node, with the settings of this host.
        listen_host: address at which ranks serve pages.
    """

    def __init__(self, first: int, config: EngineConfig, listen_host: str) -> None:
        self._config = config
        started = start_ranks("node.follower", config.parallel.ranks_per_host, listen_host)
        self._processes: dict[int, RankProcess] = dict(enumerate(started, first))
        self._sockets = {
            rank: PacketSocket(process.socket) for rank, process in self._processes.items()
        }
        self._ring: StepRing | None = None  # None: no step yet
        self._number = 0  # number of the next step

    async def start(self, store: str) -> None:
        """Make all ranks load their parts.

        Args:
            store: see StartRank.
        Raises:
            NodeUnavailable: a rank has ended.
        """
        if len(self._processes) > 1:
            await self._await_forks()
        settings = self._config.model_dump_json().encode()
        for rank, sock in self._sockets.items():
            await sock.send(_encoder.encode(StartRank(rank, settings, store, *logs.in_use())))

    async def _await_forks(self) -> None:
        for rank, sock in self._sockets.items():
            packet, files = await sock.receive()
            for each in files:
                os.close(each)  # so that the end of a rank closes its socket
            if packet != HELLO:
                raise _ended(rank)

    async def follow(self, leader: LeaderStream) -> None:
        """Forward the leader's messages until it ends the node.

        Raises:
            StreamStatus, ProtocolViolation: the stream has ended in another way.
        """
        while (message := await leader.read()) is not None:
            match message.WhichOneof("message"):
                case "step":
                    await self._take_step(message.step)
                case "packet":
                    await self._take_packet(message.packet)
                case _:
                    raise ProtocolViolation("the leader sent a second start message")

    async def reply(self, rank: int, leader: LeaderStream) -> None:
        """Forward the packets of a rank until it ends.

        Raises:
            NodeUnavailable: always, when the rank has ended.
        """
        while True:
            packet, _ = await self._sockets[rank].receive()
            if not packet:
                break
            await leader.send(rank, packet)
        raise _ended(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._processes)

    def close(self) -> int:
        """End all ranks, and wait until they have ended. Returns the highest exit code."""
        for sock in self._sockets.values():
            sock.end()  # closing it with an unread packet would be an error in the rank
        deadline = time.monotonic() + _END_S
        for rank, process in self._processes.items():
            process.close(deadline)
            log.info("rank has ended %s", kv(rank=rank, exit_code=process.process.returncode))
        return max(process.process.returncode for process in self._processes.values())

    async def _take_packet(self, packet: bytes) -> None:
        message = None if self._ring is not None else _start.decode(packet)
        if not isinstance(message, StartSteps):
            await self._send(packet)
            return
        memory = ring_memory(message.block_bytes)
        try:
            self._ring = StepRing(memory, message.block_bytes)
            for sock in self._sockets.values():
                await sock.send(packet, [memory])
        finally:
            os.close(memory)

    async def _take_step(self, part: ranks_pb2.StepPart) -> None:
        ring, end = self._ring, part.offset + len(part.tensors)
        if ring is None or end > ring.block_bytes:
            raise ProtocolViolation("the leader sent a step that is larger than a block")
        # No rank reads this block any more: the leader has waited for that.
        ring.block(self._number)[part.offset : end] = np.frombuffer(part.tensors, np.uint8)
        if part.header:
            self._number += 1
            await self._send(part.header)

    async def _send(self, packet: bytes) -> None:
        for sock in self._sockets.values():
            await sock.send(packet)


def _ended(rank: int) -> NodeUnavailable:
    return NodeUnavailable(f"rank {rank} has ended")


def host_config(start: ranks_pb2.HostStart, config: RankHostConfig) -> EngineConfig:
    """Return the configuration of the node with the settings of this host.

    Raises:
        ConfigError: they are incompatible.
    """
    wanted = config.engine.model_dump(exclude_none=True)
    whole = EngineConfig.model_validate_json(start.config)
    try:
        return EngineConfig.model_validate({**whole.model_dump(), **wanted})
    except ValidationError as error:
        reasons = (each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise ConfigError(f"engine: {'; '.join(reasons)}") from error


async def run(config: RankHostConfig) -> int:
    """Run the ranks of this host until the node ends. Returns the exit code.

    Raises:
        ConfigError, NodeUnavailable: this host cannot join.
    """
    server = config.server
    certificates = tls.certificates(server.tls, "--server.tls")
    identity = identity_of("node", node_name(secrets.randbits(64)), server.secret_file)
    proved = identity is not None or server.tls.ca is not None or server.insecure
    if not proved and not is_loopback(config.leader.rpartition(":")[0].strip("[]")):
        raise ConfigError(
            f"--leader {config.leader} is another host, and its identity would not be verified: "
            "set --secret-file, --tls-ca or --insecure"
        )
    async with rpc.make_channel(config.leader, certificates, identity) as channel:
        log.info("joining %s", kv(leader=config.leader, tls=tls.kind(certificates)))
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
        stub = ranks_pb2_grpc.RanksStub(channel)  # type: ignore[no-untyped-call]
        joined, _ = await first_of(join(config, stub), signals.get())
        if joined is None:
            return 0
        leader, start = joined.result()
        return await _serve(config, leader, start, signals)


async def _serve(
    config: RankHostConfig,
    leader: LeaderStream,
    start: ranks_pb2.HostStart,
    signals: asyncio.Queue[signal.Signals],
) -> int:
    """Run the ranks until the node or one of them ends, or this process must end."""
    try:
        ranks = _started_ranks(config, start)
    except ConfigError as error:
        failure = RankFailed(f"on {socket.gethostname()}: {error}", config=True)
        await leader.send(start.first_rank, _encoder.encode(failure))
        await leader.close()
        raise
    exit_code = 1
    try:
        followed, _ = await first_of(_follow(ranks, leader, start.store), _stopped(signals))
        if followed is not None:
            followed.result()
            log.info("the leader has ended the node")
            exit_code = 0
        else:
            log.warning("ending before the leader")
    except (StreamStatus, ServingError) as error:
        log.error("the node ends %s", kv(reason=error))
    finally:
        await leader.close()
        of_ranks = ranks.close()
    return 2 if of_ranks == _MISCONFIGURED else exit_code


def _started_ranks(config: RankHostConfig, start: ranks_pb2.HostStart) -> HostRanks:
    """Start the ranks. Raises ConfigError if this host cannot be part of the node."""
    engine = host_config(start, config)
    network = engine.parallel.trusted_network
    if network is None:
        raise ProtocolViolation("the leader has sent the configuration of a node on one host")
    # Required even if pages are served at another address, because ranks need one in this network.
    own = own_address(network, NETWORK).host
    return HostRanks(start.first_rank, engine, config.transfer.listen_host or own)


async def _follow(ranks: HostRanks, leader: LeaderStream, store: str) -> None:
    """Start the ranks and forward packets until the leader ends the node. Raises any other end."""
    await ranks.start(store)
    following = asyncio.ensure_future(ranks.follow(leader))
    replies = [asyncio.ensure_future(ranks.reply(rank, leader)) for rank in ranks]
    try:
        done, _ = await asyncio.wait({following, *replies}, return_when="FIRST_COMPLETED")
        for each in done:
            each.result()
    finally:
        for each in (following, *replies):
            each.cancel()


async def _stopped(signals: asyncio.Queue[signal.Signals]) -> None:
    """Wait until this process must end at once. After one SIGTERM it waits for the leader, which
    drains meanwhile, because Kubernetes ends all pods of a group together.
    """
    if await signals.get() == signal.SIGTERM:
        log.info("waiting for the leader to end the node. A second signal ends it at once")
        await signals.get()


def main() -> int:
    about = "Run ranks of a node on a host other than its first one."
    config = settings.read(RankHostConfig, "baton rank-host", sys.argv[1:], about=about)
    logs.setup("rank host", config.server.log_level, config.server.log_format)
    try:
        return uvloop.run(run(config))
    except ConfigError as error:
        print(f"baton rank-host: {error}", file=sys.stderr)
        return 2
    except (ServingError, StreamStatus) as error:
        log.error("the rank host ends %s", kv(reason=error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
