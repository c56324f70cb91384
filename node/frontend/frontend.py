"""The server process of a node: starts its engine process, serves its roles, and ends both
processes.

The module `program` of a role's package has its RoleProgram. The server process is stateless: if
either process dies, the other ends too.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import uvloop

from common import logs, rpc
from common.errors import ConfigError, EngineDied, FailedPrecondition, NodeUnavailable
from common.logs import kv
from common.metrics.serving import served
from common.process import resources
from common.process.ipc import socket_pair
from common.process.leash import leashed
from node.frontend.engine_link import EngineLink, RoleProgram
from node.frontend.kv_events import publishing
from node.frontend.tenure import ExitVerdict, ProcessExit, RoleTenure, TenurePost
from node.metrics import NodeMetrics

log = logging.getLogger(__name__)

# A step has hundreds of parallel regions, and waking a thread for each costs a fifth of the step.
# So threads spin for about 0.1 ms before they sleep. OpenMP reads this when torch is loaded. It
# would override a policy that the user has set.
_OPENMP = {"GOMP_SPINCOUNT": "20000"}
_POLICY = "OMP_WAIT_POLICY"


class EngineHandle(Protocol):
    """An engine as the frontend sees it. EngineProcess documents the members."""

    transfer_socket: socket.socket

    @property
    def engine_socket(self) -> socket.socket: ...

    @property
    def pid(self) -> int: ...

    def renew_transfer_socket(self) -> None: ...

    async def ended(self, timeout_s: float | None = None) -> int | None: ...

    async def end(self, grace_s: float) -> int: ...

    def close(self) -> None: ...


class EngineProcess:
    """A running `python -m MODULE`, and the frontend's ends of its sockets.

    Created on the frontend's main thread, because the engine dies with the thread that created it.

    Attributes:
        transfer_socket: to the transfer thread of the role that begins next. Owned by the code that
            opens it.
    """

    def __init__(self, module: str) -> None:
        self.engine_socket, engine_end = socket_pair()
        # Each message carries one socket.
        self._hand_over, handed_over = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends = (engine_end.fileno(), handed_over.fileno())
        # An engine that reads ends by end of file. The leash ends one that is importing or stuck.
        command = [sys.executable, "-m", module, *map(str, ends)]
        # Until the engine ignores them, Ctrl-C and SIGTERM to the process group would kill it. A
        # blocked signal stays blocked over exec, and is delivered here when it is unblocked.
        meant_for_us = {signal.SIGINT, signal.SIGTERM}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, meant_for_us)
        try:
            self._process = subprocess.Popen(
                leashed(command, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                env={**({} if _POLICY in os.environ else _OPENMP), **os.environ},
                pass_fds=ends,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            engine_end.close()
            handed_over.close()
        self.renew_transfer_socket()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._notice_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def renew_transfer_socket(self) -> None:
        """Create a transfer socket for the role whose StartRole is sent next."""
        self.transfer_socket, theirs = socket_pair()
        with theirs, contextlib.suppress(OSError):  # the engine's end is reported elsewhere
            socket.send_fds(self._hand_over, [b"s"], [theirs.fileno()])

    async def ended(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end of the process and return the exit code, negative for a signal. Returns
        None if it still runs after `timeout_s`.
        """
        try:
            # Not wait_for: in Python 3.11 it can lose a cancellation that comes with the event.
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return None
        return self._process.wait()

    async def end(self, grace_s: float) -> int:
        """Wait for `grace_s`, then kill the process. Returns the exit code."""
        code = await self.ended(grace_s)
        if code is None:
            self._process.kill()
            code = await self.ended()
        assert code is not None
        return code

    def _notice_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._ended.set()

    def close(self) -> None:
        """Kill the process if it still runs. Idempotent. Called whenever the frontend ends."""
        if self._pidfd < 0:
            return
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self.engine_socket.close()
        self._hand_over.close()


def exit_sentence(code: int) -> str:
    """Return "was killed by SIGKILL" or "ended with exit code 1"."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


_LAST_WORDS_S = 1.0  # from the engine's end of file to its end
_ENGINE_END_S = 5.0  # for the engine to release its memory after a drain
_HASTY_END_S = 1.0  # the same when the node must end soon
_END_S = 30.0  # for the whole end of a node, including the interpreter's
_RESTART_S = 60.0  # for the engine to begin another role


def _no_other(role: str) -> RoleProgram:
    raise FailedPrecondition("this node has one role")


def run_node(
    program: RoleProgram,
    *,
    spawn: Callable[[], EngineHandle],
    other: Callable[[str], RoleProgram] = _no_other,
) -> int:
    """Run a node to its end and return the exit code of its process.

    0: ended as requested. 1: the engine, or this frontend, failed. 2: the configuration is invalid,
    for the reason in one line on stderr.

    Args:
        program: the node's first role.
        spawn: starts the engine. Called once, on the event loop.
        other: returns a role by name. Raises ServingError if the node cannot have that role.
    """

    async def run() -> int:
        node = Node(program, spawn, other, on_role=_set_up_log, on_end=_end_in_time)
        return await run_nodes([node])

    _set_up_log(program)
    try:
        return run_loop(run)
    except ConfigError as error:
        print(f"baton serve {program.role}: {error}", file=sys.stderr)
        return 2


def run_loop(run: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run the event loop of a process that has nodes."""
    resources.allow_many()
    resources.hold_little()
    return uvloop.run(run())


class RunningNode(Protocol):
    """A node of this process. Node documents the methods."""

    def signalled(self, name: str) -> None: ...

    async def run(self) -> int: ...


async def run_nodes(nodes: Sequence[RunningNode]) -> int:
    """Run nodes until all have ended, and return the highest of their exit codes. Signals to this
    process go to all of them.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        for_all = partial(_signal_all, nodes, number.name)
        loop.add_signal_handler(number, for_all)
    trimming = asyncio.ensure_future(resources.keep_trimming())
    try:
        return max(await asyncio.gather(*(node.run() for node in nodes)))
    finally:
        trimming.cancel()


def _signal_all(nodes: Sequence[RunningNode], name: str) -> None:
    for node in nodes:
        node.signalled(name)


def _set_up_log(program: RoleProgram) -> None:
    logs.setup(program.role, program.config.server.log_level, program.config.server.log_format)


def _end_in_time() -> None:
    """Limit the time of the process's end. Every known wait has its own deadline. If something else
    blocks, such as a library's thread, all stacks are dumped and the exit code is 1.
    """
    faulthandler.dump_traceback_later(_END_S, exit=True)


class Node:
    """A node. Created and used on the event loop.

    Args:
        program, spawn, other: see run_node.
        on_role: called with each later role when the node enters it.
        on_end: called when the node begins to end.
    """

    def __init__(
        self,
        program: RoleProgram,
        spawn: Callable[[], EngineHandle],
        other: Callable[[str], RoleProgram] = _no_other,
        *,
        on_role: Callable[[RoleProgram], None] = lambda program: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._program = program
        self._config = program.config.server
        self._spawn = spawn
        self._other = other
        self._on_role = on_role
        self._on_end = on_end
        self._metrics = NodeMetrics(program.role)
        self._ending = ProcessExit()
        self._engine_released = asyncio.Event()
        self._link = EngineLink(lambda _: self._engine_released.set())
        self._tenure: RoleTenure
        self._publish: Callable[[bytes], None] = lambda payload: None
        self._exit_code = 0

    def signalled(self, name: str) -> None:
        self._ending.signalled(name)

    async def run(self) -> int:
        """Serve until the node has ended. Returns its exit code, see run_node."""
        server = self._config
        with ExitStack() as stack:
            # Reserved, because no process listens on the port between two roles.
            port = stack.enter_context(rpc.reserved(server.host, server.port))
            if server.health_port:
                stack.enter_context(
                    rpc.reserved(server.host, server.health_port, flag=rpc.HEALTH_PORT)
                )
            trust = self._metrics.trust
            address = rpc.join_address(self._program.config.announced_host, port)
            post: TenurePost | None = TenurePost.of(self._program, address, trust)
            metrics_port = stack.enter_context(
                served(self._metrics.registry, server.host, server.metrics_port)
            )
            kv_events = stack.enter_context(publishing(self._program.config.kv_events))
            engine = self._spawn()
            stack.callback(engine.close)
            work = [self._watch(engine)]
            if kv_events is not None:
                self._publish = kv_events.publish
                work += kv_events.background()
            async with self._ending.guarded(work):
                while post is not None:
                    post = await self._serve(post, engine, metrics_port)
        return self._exit_code

    async def _serve(
        self, post: TenurePost, engine: EngineHandle, metrics_port: int | None
    ) -> TenurePost | None:
        """Serve in one role. Returns the next role's post, or None if the node has ended."""
        tenure = self._tenure = RoleTenure(
            post,
            engine.transfer_socket,
            self._link,
            self._metrics,
            self._ending,
            engine_pid=engine.pid,
            program_of=self._program_of,
            publish=self._publish,
        )
        self._link.on_notice = tenure.notice
        async with tenure.serving(metrics_port):
            if post.ready is None:
                await self._link.open(engine.engine_socket, post.start)
                resources.stay()
            verdict = await self._ending.verdict(tenure.begin_drain, self._config.drain_timeout_s)
            if verdict is None:
                successor = tenure.successor
                assert successor is not None
                following = TenurePost.of(successor, post.start.address, self._metrics.trust)
                await tenure.end(NodeUnavailable(f"the node becomes a {successor.role} node"))
                engine.renew_transfer_socket()
                restarted = asyncio.ensure_future(self._link.restart(following.start))
                verdict = await self._ending.before(restarted, _RESTART_S)
                if verdict is None:
                    self._on_role(successor)
                    return replace(following, ready=restarted.result())
            self._exit_code = await self._end(verdict, tenure, engine)
            return None

    def _program_of(self, role: str) -> RoleProgram:
        if role == self._tenure.role:
            raise FailedPrecondition(f"this is a {role} node already")
        if self._tenure.is_paused:
            raise FailedPrecondition(
                "this node is paused, so its requests cannot finish or migrate: resume it first"
            )
        if self._ending.wanted:
            raise FailedPrecondition("the node is draining")
        return self._other(role)

    async def _watch(self, engine: EngineHandle) -> None:
        """Wait for the end of the engine's process or of its socket. Either ends the node."""
        ended = asyncio.ensure_future(engine.ended())
        released = asyncio.ensure_future(self._engine_released.wait())
        try:
            await asyncio.wait({ended, released}, return_when="FIRST_COMPLETED")
            code = await engine.end(_LAST_WORDS_S)
            # The socket may still have final messages with a better reason.
            await asyncio.wait({released}, timeout=_LAST_WORDS_S)
        finally:
            ended.cancel()
            released.cancel()
        self._ending.engine_died(f"the engine {exit_sentence(code)}")

    async def _end(self, verdict: ExitVerdict, tenure: RoleTenure, engine: EngineHandle) -> int:
        self._on_end()
        if verdict.exit_code == 2:
            print(f"baton serve {tenure.role}: {verdict.reason}", file=sys.stderr)
        else:
            level = logging.ERROR if verdict.exit_code else logging.INFO
            log.log(level, "ending %s", kv(reason=verdict.reason))
        error = EngineDied if verdict.engine_died else NodeUnavailable
        await tenure.end(error(f"the node has ended: {verdict.reason}"))
        self._link.close()
        code = await engine.end(_ENGINE_END_S if verdict.in_order else _HASTY_END_S)
        if verdict.in_order and code:
            log.error("engine did not exit cleanly %s", kv(engine=exit_sentence(code)))
            return 1
        return verdict.exit_code
