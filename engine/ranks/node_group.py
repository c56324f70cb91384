"""Rendezvous of the nodes of a data-parallel group on one host, in a configured directory.

    rank 0: listens ............ one JoinGroup each -> JoinedGroup to all, and listens no more
    others: connect -> JoinGroup ------------------------^

Each node is started separately. All nodes end when one ends. A restarted node therefore waits until
the others are restarted, too.
"""

import contextlib
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from common.config import ParallelConfig
from common.errors import ConfigError, EngineFault
from common.logs import kv
from common.process.polling import poll_ready
from engine.ranks.expert_exchange import ExpertExchange
from engine.ranks.lockstep import Lockstep
from engine.ranks.shm import SharedMemoryGroup, memory_bytes, new_memory

MEET_S = 600.0  # seconds from the start of a node until all nodes of its group have started
LOAD_S = 3600.0  # seconds to load weights from a slow disk
_RETRY_S = 0.1  # seconds between two attempts to connect
_REPLY_S = 5.0  # seconds to wait for a message that a connected node sends at once
_NUM_MEMORIES = 3
_MAX_MESSAGE_BYTES = 64 << 10
_MAX_FILES = 253

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.encode


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Request of a node to join. The packet has a pidfd of its engine, and the eventfd on which it
    sleeps.

    Attributes:
        settings: all settings that must be equal on all nodes.
    """

    rank: int
    settings: str


class JoinedGroup(msgspec.Struct, frozen=True, tag=True):
    """The reply. The packet has the memories of the group, and the pidfds and eventfds of all other
    nodes, both by rank.

    Attributes:
        error: the reason why the node cannot join. "": it has joined.
    """

    error: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class NodeGroup:
    """A data-parallel group as one of its nodes sees it.

    Attributes:
        loading: collectives used once, when this node has loaded its weights.
    """

    exchange: ExpertExchange
    lockstep: Lockstep
    loading: SharedMemoryGroup

    def meet(self) -> None:
        """Wait until all nodes have loaded their weights. Raises RankLost if one of them ends."""
        self.loading.all_reduce(torch.zeros(1))
        self.loading.close()

    def close(self) -> None:
        """Leave the group. No step may be in flight."""
        self.lockstep.close()
        self.exchange.close()


def join_group(config: ParallelConfig, settings: str, wake: int) -> NodeGroup:
    """Wait until all nodes of the group have started.

    Args:
        config: a configuration with a group.
        settings: see JoinGroup.
        wake: eventfd on which this node sleeps. Not owned.
    Raises:
        ConfigError: other users can access the directory, or the nodes have different settings.
        EngineFault: a node is missing after MEET_S.
    """
    rank, size, timeout_s = config.dp_rank, config.dp, config.collective_s
    assert config.dp_group is not None
    with _entered(config.dp_group) as directory:
        place = f"{directory}/rank-0"  # short, even if the directory's name is long
        own = os.pidfd_open(os.getpid()), wake
        try:
            if rank == 0:
                files = _lead(place, size, settings, own)
            else:
                files = _follow(place, JoinGroup(rank, settings), own)
        finally:
            os.close(own[0])
    memories, others = files[:_NUM_MEMORIES], files[_NUM_MEMORIES:]
    pidfds, wakes = others[: size - 1], others[size - 1 :]
    numbers = [other for other in range(size) if other != rank]

    def group(memory: int, timeout_s: float) -> SharedMemoryGroup:
        owned = {other: os.dup(pidfd) for other, pidfd in zip(numbers, pidfds, strict=True)}
        return SharedMemoryGroup(rank, range(size), memory, owned, timeout_s)

    tokens, turns = (group(memory, timeout_s) for memory in memories[:2])
    loading = group(memories[2], LOAD_S)
    for memory in memories:
        os.close(memory)
    exchange = ExpertExchange(rank, size, tokens)
    log.info("group complete %s", kv(group=config.dp_group.name, rank=rank, nodes=size))
    return NodeGroup(exchange, Lockstep(turns, pidfds, wakes), loading)


@contextlib.contextmanager
def _entered(directory: Path) -> Iterator[str]:
    """Yield a short name of a directory that only this user can access."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"engine.parallel.dp_group: {directory} cannot be used: {error.strerror}"
        ) from error
    try:
        state = os.fstat(descriptor)
        if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
            raise ConfigError(
                f"engine.parallel.dp_group: {directory} must belong to this user alone (mode 0700)"
            )
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _lead(place: str, size: int, settings: str, own: Sequence[int]) -> Sequence[int]:
    """Accept all other nodes. Return this node's descriptors, see JoinedGroup."""
    deadline = time.monotonic() + MEET_S
    joined: dict[int, _Connection] = {}
    with contextlib.ExitStack() as open_until_joined:
        with _socket() as listener:
            Path(place).unlink(missing_ok=True)
            listener.bind(place)
            listener.listen(size)
            while len(joined) < size - 1:
                waiting = [listener, *(each.socket for each in joined.values())]
                left_s = max(0.0, deadline - time.monotonic())
                ready, _ = poll_ready(waiting, seconds=left_s)
                if not ready:
                    missing = sorted({*range(1, size)} - joined.keys())
                    raise EngineFault(
                        f"nodes {missing} of the group did not join within {MEET_S} s"
                    )
                for rank in [rank for rank, each in joined.items() if each.socket in ready]:
                    del joined[rank]  # it has ended, and may be restarted
                if listener in ready and (one := _accepted(listener, size, settings, joined)):
                    open_until_joined.callback(one.close)
                    joined[one.rank] = one
            Path(place).unlink()
        memories = [new_memory("baton-group", memory_bytes(size)) for _ in range(_NUM_MEMORIES)]
        nodes = [own, *(joined[rank].files for rank in range(1, size))]

        def files_of(rank: int) -> list[int]:
            others = [node for other, node in enumerate(nodes) if other != rank]
            return [*memories, *(pidfd for pidfd, _ in others), *(wake for _, wake in others)]

        for rank, each in joined.items():
            with contextlib.suppress(OSError):  # it has ended, and its pidfd reports that
                socket.send_fds(each.socket, [_encode(JoinedGroup())], files_of(rank))
        return [*memories, *(os.dup(file) for file in files_of(0)[_NUM_MEMORIES:])]


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """Another node, as rank 0 sees it."""

    rank: int
    socket: socket.socket
    files: Sequence[int]  # its pidfd, and its eventfd

    def close(self) -> None:
        self.socket.close()
        for file in self.files:
            os.close(file)


def _accepted(
    listener: socket.socket, size: int, settings: str, joined: dict[int, _Connection]
) -> _Connection | None:
    """Return the node that connects, or None if it is not allowed to join."""
    connection, _ = listener.accept()
    connection.settimeout(_REPLY_S)
    files: Sequence[int] = ()
    try:
        if _user_of(connection) != os.getuid():
            raise ConfigError("it runs as another user")
        packet, files, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 2)
        message = msgspec.msgpack.decode(packet, type=JoinGroup)
        if message.settings != settings:
            raise ConfigError("its settings differ from those of rank 0")
        if not 0 < message.rank < size:
            raise ConfigError(f"rank {message.rank} is invalid: the group has {size} nodes")
        if message.rank in joined:
            raise ConfigError(f"the group has a node of rank {message.rank} already")
        if len(files) != 2:
            raise ConfigError("its message is incomplete")
        return _Connection(message.rank, connection, files)
    except (ConfigError, OSError, msgspec.MsgspecError) as error:
        with contextlib.suppress(OSError):
            connection.send(_encode(JoinedGroup(str(error))))
        _Connection(0, connection, files).close()
        return None


def _follow(place: str, message: JoinGroup, own: Sequence[int]) -> Sequence[int]:
    """Join the group of rank 0. Return this node's descriptors, see JoinedGroup."""
    deadline = time.monotonic() + MEET_S
    while (left := deadline - time.monotonic()) > 0:
        with _socket() as connection:
            connection.settimeout(left)
            try:
                connection.connect(place)
                socket.send_fds(connection, [_encode(message)], own)
                packet, files, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, _MAX_FILES)
            except OSError:
                packet, files = b"", []
        if not packet:  # rank 0 does not listen yet, or has ended
            time.sleep(_RETRY_S)
            continue
        if error := msgspec.msgpack.decode(packet, type=JoinedGroup).error:
            raise ConfigError(f"engine.parallel.dp_group: this node cannot join the group: {error}")
        for file in files:
            os.set_inheritable(file, False)
        return files
    raise EngineFault(f"rank 0 of the group did not start within {MEET_S} s")


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a socket."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
