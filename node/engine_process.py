"""The engine process's connection to its frontend: start, the engine thread's channel, and the end
of the process.

The main module of an engine process calls `run_engine(NODE_CONFIGS, body, "name")`. Only a frontend
starts the process, which ends when that frontend ends (common/process/leash.py).
"""

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from common import logs
from common.config import NodeConfig
from common.errors import ConfigError, RankLost
from common.logs import kv
from common.process.ipc import FrameSocket, PeerGone, WakeUp
from common.process.polling import poll_ready
from node.messages import EngineFailed, EngineMessage, FrontMessage, StartRole

log = logging.getLogger(__name__)

C = TypeVar("C", bound=NodeConfig)

_START_S = 30.0  # from exec to the frontend's first frame
_FLUSH_S = 2.0  # for the final messages
# Seconds for which a thread with work waits for another thread that runs Python. The default of 5
# ms exceeds the time to send a message to a peer or to launch a step.
_SWITCH_S = 0.0005


class EngineChannel:
    """The engine thread's socket to its frontend. Only the engine thread uses it, except `wake`.

    Args:
        handed_over: socket over which the frontend passes a socket to its pair streams, with each
            StartRole.
    """

    def __init__(self, frames: FrameSocket[FrontMessage], handed_over: socket.socket) -> None:
        self._frames = frames
        self._handed_over = handed_over
        self._wake_up = WakeUp()

    def take(self) -> list[FrontMessage]:
        """Return the messages that have arrived since the last call, in order. Never blocks.

        Raises:
            PeerGone: the frontend has ended, or wants this process to end. Release everything and
                return.
        """
        return self._frames.receive()

    def post(self, message: EngineMessage) -> None:
        """Send a message, or queue it until the frontend reads. Never blocks.

        Raises:
            Backlogged: the frontend is stuck, so the node cannot continue.
        """
        self._frames.send(message)

    def wait(self, timeout_s: float) -> None:
        """Sleep until the frontend has sent something, another thread calls `wake`, or the timeout
        expires. Returns at once after a wake-up since the last `wait`.
        """
        self._wake_up.sleep(self._frames, timeout_s)
        self._frames.flush()

    def wake(self) -> None:
        """End the current or the next `wait`. Any thread may call it. Never blocks."""
        self._wake_up.wake()

    @property
    def wakeup(self) -> int:
        """The eventfd that `wake` writes to, for other processes."""
        return self._wake_up.fileno()

    def watch(self, descriptor: int) -> None:
        """Make `wait` return at once while this descriptor is readable."""
        self._wake_up.watch(descriptor)

    def flush(self, timeout_s: float) -> None:
        """Send queued messages, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._frames.wants_write and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())

    def transfer_socket(self) -> socket.socket:
        """Return the socket that came with the last StartRole. Called once for each StartRole.

        Raises:
            PeerGone: no socket came.
        """
        _, fds, _, _ = socket.recv_fds(self._handed_over, 1, 1)
        if not fds:
            raise PeerGone("the frontend has handed over no socket")
        os.set_inheritable(fds[0], False)
        return socket.socket(fileno=fds[0])

    def close(self) -> None:
        self._frames.close()
        self._handed_over.close()


@dataclass(frozen=True, slots=True)
class EngineStart(Generic[C]):
    """The values that an engine process gets from its frontend for one role."""

    role: str
    config: C
    instance: int  # instance id of this node in this role
    address: str  # address of the frontend's gRPC server
    channel: EngineChannel
    transfer_socket: socket.socket  # to the frontend's pair streams. Owned by the body


# Returns the values of a StartRole for its role. From then on, log lines name that role.
Begin: TypeAlias = Callable[[StartRole], EngineStart[Any]]


def run_engine(
    configs: Mapping[str, type[NodeConfig]], body: Callable[[Begin, StartRole], None], name: str
) -> NoReturn:
    """Run an engine until its process ends.

    `body` runs on the main thread. It sends EngineReady, and returns after Drained or lets PeerGone
    through: exit code 0. ConfigError, which the user must fix: exit code 2. Any other exception is
    a fault of the engine: the frontend is notified, and the process ends at once with exit code 1,
    whatever other threads do.

    Args:
        configs: config record of each role.
        name: name in the log, after the role's.
    """
    # Both signals may be sent to the whole process group. Only the frontend decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable()
    sys.setswitchinterval(_SWITCH_S)
    engine_fd, handed_over_fd = (int(argument) for argument in sys.argv[1:3])
    for fd in (engine_fd, handed_over_fd):
        os.set_inheritable(fd, False)
    frames: FrameSocket[FrontMessage] = FrameSocket(socket.socket(fileno=engine_fd), FrontMessage)
    first = _await_start(frames)
    channel = EngineChannel(frames, socket.socket(fileno=handed_over_fd))

    def begin(start: StartRole) -> EngineStart[Any]:
        config = configs[start.role].model_validate_json(start.config)
        logs.setup(f"{start.role} {name}", config.server.log_level, config.server.log_format)
        pairs = channel.transfer_socket()
        return EngineStart(start.role, config, start.instance, start.address, channel, pairs)

    _run(channel, lambda: body(begin, first))
    _leave(0)


def _run(channel: EngineChannel, body: Callable[[], None]) -> None:
    try:
        body()
        channel.flush(_FLUSH_S)
    except PeerGone:
        log.info("engine stopped by the frontend")
    except ConfigError as error:
        _fail(channel, EngineFailed(str(error), config=True), exit_code=2)
    except RankLost as error:  # the traceback would only show where it was noticed
        log.error("a rank is lost, and this node ends %s", kv(reason=error))
        _fail(channel, EngineFailed(str(error)), exit_code=1)
    except Exception as error:
        log.exception("the engine failed")
        _fail(channel, EngineFailed(f"{type(error).__name__}: {error}"[:2000]), exit_code=1)


def _fail(channel: EngineChannel, last_words: EngineFailed, exit_code: int) -> NoReturn:
    # The frontend may be what failed. It notices the end anyway.
    with contextlib.suppress(Exception):
        channel.post(last_words)
        channel.flush(_FLUSH_S)
    _leave(exit_code)


def _leave(exit_code: int) -> NoReturn:
    """End the process without sys.exit, which would wait for threads that may be stuck in a forward
    pass or a read, and for the interpreter's cleanup.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _await_start(frames: FrameSocket[FrontMessage]) -> StartRole:
    readable, _ = poll_ready([frames], seconds=_START_S)
    try:
        messages = frames.receive() if readable else []
    except PeerGone:
        sys.exit(0)
    match messages:
        case [StartRole() as start]:
            return start
        case _:
            sys.exit("this is the engine process of a node: start the node with `baton serve`")
