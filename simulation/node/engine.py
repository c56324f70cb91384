"""A simulated engine on the event loop of its frontend, instead of an engine process."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence

from common.config import NODE_CONFIGS
from common.errors import ConfigError
from common.logs import kv
from common.process.ipc import FrameSocket, PeerGone, socket_pair
from engine.core import EngineCore
from node.control.engine_control import RoleEnded
from node.messages import EngineFailed, EngineMessage, FrontMessage, StartRole
from node.role_parts import DrivenRole, load_roles
from simulation.device.runner import SimRunner, SimStep
from simulation.node.link import WireTo, healthy
from simulation.node.options import check_config
from simulation.node.parts import SimParts
from simulation.node.runtime import SimRuntime

log = logging.getLogger(__name__)

_FLUSH_S = 0.01  # seconds between two attempts to send to a frontend that does not read
_KILLED = -9  # exit code of an engine that the frontend has ended


class SimChannel:
    """The engine's end of the socket to its frontend. `wait` only stores the time for `sleep`."""

    def __init__(self, sock: socket.socket) -> None:
        self._frames: FrameSocket[FrontMessage] = FrameSocket(sock, FrontMessage)
        self._woken = asyncio.Event()
        self._wait_s = 0.0

    def take(self) -> Sequence[FrontMessage]:
        return self._frames.receive()

    def post(self, message: EngineMessage) -> None:
        self._frames.send(message)

    def wait(self, timeout_s: float) -> None:
        self._wait_s = timeout_s

    def wake(self) -> None:
        """End the next `sleep`, or the current one."""
        self._woken.set()

    async def sleep(self) -> None:
        """Sleep until the time of the last `wait`, a message from the frontend, or `wake`.

        The socket is watched only during a sleep, because a busy engine does not read it.
        """
        loop = asyncio.get_running_loop()
        self._frames.flush()
        wait_s = min(self._wait_s, _FLUSH_S) if self._frames.wants_write else self._wait_s
        loop.add_reader(self._frames.fileno(), self._woken.set)
        timer = loop.call_later(max(wait_s, 0.0), self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()
            loop.remove_reader(self._frames.fileno())
            self._woken.clear()

    def close(self) -> None:
        self._frames.close()


class SimEngine:
    """The frontend's view of a simulated engine. EngineProcess documents the other members.

    Create it on the event loop on which the engine will run.

    Attributes:
        runner, core: None until the engine has started.
        moves: cleared while the engine is frozen, for tests of failures.

    Args:
        wire_to: network between this node and others.
    """

    def __init__(self, wire_to: WireTo = healthy) -> None:
        self.engine_socket, engine_end = socket_pair()
        self._wire_to = wire_to
        self._channel = SimChannel(engine_end)
        self._handed_over: list[socket.socket] = []
        self.runner: SimRunner | None = None
        self.core: EngineCore | None = None
        self.moves = asyncio.Event()
        self.moves.set()
        self.renew_transfer_socket()
        self._task = asyncio.ensure_future(self._run())

    @property
    def pid(self) -> int:
        return os.getpid()

    def renew_transfer_socket(self) -> None:
        self.transfer_socket, theirs = socket_pair()
        self._handed_over.append(theirs)

    async def ended(self, timeout_s: float | None = None) -> int | None:
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            return None
        return _KILLED if self._task.cancelled() else self._task.result()

    async def end(self, grace_s: float) -> int:
        code = await self.ended(grace_s)
        if code is None:
            self._task.cancel()
            code = await self.ended()
        assert code is not None
        return code

    def close(self) -> None:
        self._task.cancel()
        # The frontend's transport closes the socket at end of file. If it were closed here, the
        # loop would not watch the next socket with the same number.
        with contextlib.suppress(OSError):
            self.engine_socket.shutdown(socket.SHUT_RDWR)
        for unused in self._handed_over:
            unused.close()

    async def _run(self) -> int:
        """Serve in one role after another, as the frontend requests. Returns the exit code."""
        channel = self._channel
        try:
            await self._serve(await self._first_start())
        except PeerGone:
            log.info("engine stopped by the frontend")
            return 0
        except ConfigError as error:
            channel.post(EngineFailed(str(error), config=True))
            return 2
        except Exception as error:
            log.exception("the simulated engine failed")
            with contextlib.suppress(Exception):  # the frontend may be what failed
                channel.post(EngineFailed(f"{type(error).__name__}: {error}"[:2000]))
            return 1
        finally:
            channel.close()
        return 0

    async def _first_start(self) -> StartRole:
        while True:
            self._channel.wait(3600.0)
            await self._channel.sleep()
            for message in self._channel.take():
                assert isinstance(message, StartRole), "a frontend begins with StartRole"
                return message

    async def _serve(self, start: StartRole) -> None:
        roles = load_roles()
        config = NODE_CONFIGS[start.role].model_validate_json(start.config)
        check_config(config)
        # All host pages, because the node may become a decode node. Simulated pages cost nothing.
        wanted = roles[start.role].wants(config.engine)
        parts = SimParts.of(wanted.model_copy(update={"cache": config.engine.cache}))
        self.runner, self.core = parts.runner, parts.core
        log.info(
            "simulated engine %s",
            kv(
                device=config.engine.device,
                model=config.engine.model,
                link=config.engine.sim.link,
                band=parts.cost.band,
                note="all times are simulated, not measured",
            ),
        )
        try:
            while True:
                config = NODE_CONFIGS[start.role].model_validate_json(start.config)
                roles[start.role].check(parts)
                transfer_socket = self._handed_over.pop(0)
                runtime = SimRuntime.of(
                    parts, start, config, self._channel, transfer_socket, self._wire_to
                )
                role = roles[start.role].make_role(parts, runtime, config)
                try:
                    await self._drive(role, runtime, parts)
                except RoleEnded as over:
                    start = over.successor
                finally:
                    runtime.close()
        finally:
            parts.close()

    async def _drive(self, role: DrivenRole, runtime: SimRuntime, parts: SimParts) -> None:
        """Run the loop until PeerGone or RoleEnded. Its waits are sleeps of this coroutine."""
        runtime.begin(parts)
        for awaited in runtime.loop(role, parts).turns():
            if awaited is None:
                await self._channel.sleep()
                await self.moves.wait()
                parts.runner.now = time.monotonic()
            else:
                assert isinstance(awaited, SimStep)
                await _until(parts.runner.due(awaited))
                await self.moves.wait()
                parts.runner.reached(awaited)


async def _until(end: float) -> None:
    """Wait until `end` in time.monotonic(), to the millisecond. Always yields."""
    await asyncio.sleep(max(end - time.monotonic(), 0.0))
