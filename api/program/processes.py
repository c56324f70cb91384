"""Several router processes on the same ports, under a parent process that serves no requests.

Each worker process is a whole router, with its own streams to every node. The kernel distributes
connections, and limits apply to each process. Reports cover all processes: a process queries the
others for running requests, and the parent adds up their metrics.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec.structs import replace

from api.admin.router_state import STATE
from api.program.merged_metrics import MetricsAggregator
from common import rpc
from common.config import RouterConfig
from common.errors import ConfigError
from common.logs import kv
from common.metrics.serving import served
from common.process.children import ChildProcess
from common.process.waiting import first_of
from protos.router_pb2 import WorkerState
from router.workers import (
    IN_TURN,
    PATH,
    OtherProcesses,
    ProcessHandler,
    ProcessSlot,
    other_processes,
    serving_handlers,
)

log = logging.getLogger(__name__)

_LONGEST_S = 600.0  # seconds for one process to drain, start and become ready
_LOOK_S = 0.1


T = TypeVar("T")

_MIN_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_END_S = 10.0  # seconds in addition to the drain time


async def keep(config: RouterConfig) -> int:
    """Run `config.processes` worker processes until SIGTERM or SIGINT, and restart any that ends.

    Signals are forwarded to them.

    Returns:
        The exit code: not 0 if a process could not be started at first, or did not end cleanly.

    Raises:
        ConfigError: a port is taken, or the directory for the processes' sockets cannot be made.
    """
    async with _kept(config) as (processes, end):
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, end.signalled, number)
        try:
            up = await _started(processes, end.stopping)
            if up:
                log.info("all router processes started %s", kv(processes=len(processes)))
                await asyncio.gather(*(process.keep(end.stopping) for process in processes))
        finally:
            codes = await asyncio.gather(
                *(process.end(config.server.drain_timeout_s + _END_S) for process in processes)
            )
        return max(codes) if up else max(codes) or 1


class _Shutdown:
    """Shutdown of all processes by a forwarded signal or an operator, and their rolling restart.

    In a rolling restart, each process is started again before the next one stops. A signal after an
    operator's call does not count as a second signal: Kubernetes calls in preStop, then sends
    SIGTERM.

    Attributes:
        stopping: set when the processes stop for good.

    Args:
        routers: client of the same processes, by their index in `processes`.
    """

    def __init__(self, processes: "Sequence[_Process]", routers: OtherProcesses) -> None:
        self._processes = processes
        self._routers = routers
        self._forwards_signals = True
        self._turns: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()

    @property
    def handlers(self) -> Mapping[str, ProcessHandler]:
        """Return the handler for requests from worker processes."""

        async def handle(query: Mapping[str, str]) -> bytes:
            if query[IN_TURN] == "no":
                if not self.stopping.is_set():
                    self._forwards_signals = False
                    self._send(signal.SIGTERM)
            elif self._turns is None or self._turns.done():
                self._turns = asyncio.create_task(self._take_turns())
            return b""

        return {PATH: handle}

    def signalled(self, number: signal.Signals) -> None:
        if self._forwards_signals:
            self._send(number)
        self._forwards_signals = True

    def close(self) -> None:
        """Stop the rolling restart."""
        if self._turns is not None:
            self._turns.cancel()

    def _send(self, number: signal.Signals) -> None:
        self.stopping.set()
        for process in self._processes:
            process.send(number)

    async def _take_turns(self) -> None:
        """Restart one process after the other. Stop at one that does not become ready again."""
        for number, process in enumerate(self._processes):
            log.info("router process restarted %s", kv(process=number))
            try:
                async with asyncio.timeout(_LONGEST_S):
                    await process.renew()
                    while not await self._serves(number):  # noqa: ASYNC110  (it is another process)
                        await asyncio.sleep(_LOOK_S)
            except TimeoutError:
                log.error(
                    "router process did not restart in time %s",
                    kv(process=number, after_s=_LONGEST_S),
                )
                return
        log.info("all router processes restarted")

    async def _serves(self, number: int) -> bool:
        replies = await self._routers.ask(STATE)
        worker = WorkerState.FromString(replies.bodies.get(number, b""))
        return worker.state.state == "ready"


async def _started(processes: "list[_Process]", stop: asyncio.Event) -> bool:
    """Start the first process alone, so that an error common to all is reported once."""
    first, *others = processes
    if not await first.start():
        return False
    return not stop.is_set() and all(await asyncio.gather(*(one.start() for one in others)))


class _Process:
    """A worker process. It is not restarted after a request to stop."""

    def __init__(self, place: ProcessSlot, config: RouterConfig) -> None:
        self._place = place
        self._config = config.model_dump_json()
        self._child: ChildProcess | None = None
        self._stopping = False
        self._renewing: asyncio.Event | None = None  # set when the replacement listens

    async def start(self, *, again: bool = False) -> bool:
        """Start the process. Return whether it listens. Otherwise it has ended.

        Args:
            again: see ProcessSlot.
        """
        here, there = os.pipe()
        place = msgspec.json.encode(replace(self._place, again=again)).decode()
        try:
            worker = [sys.executable, "-m", "api.program.serving"]
            command = [*worker, str(there), place, self._config]
            self._child = ChildProcess("router", command, log=None, descriptors=(there,))
        finally:
            os.close(there)
        return await _first_byte(os.fdopen(here, "rb", buffering=0))

    async def keep(self, stop: asyncio.Event) -> None:
        """Restart the process whenever it ends, until `stop`."""
        backoff_s = _MIN_BACKOFF_S
        while self._child is not None and not self._stopping:
            started_at = time.monotonic()
            code = await _unless(stop, self._child.ended())
            if code is None:
                return
            renewing, self._renewing = self._renewing, None
            if renewing is None:
                if time.monotonic() - started_at > _MAX_BACKOFF_S:
                    backoff_s = _MIN_BACKOFF_S
                fields = kv(process=self._place.number, code=code, restart_in_s=backoff_s)
                log.error("router process ended %s", fields)
                await _unless(stop, asyncio.sleep(backoff_s))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            if not stop.is_set() and await self.start(again=True) and renewing is not None:
                renewing.set()

    async def renew(self) -> None:
        """Drain the process, and return when its replacement, started by `keep`, listens."""
        if self._child is not None:
            renewed = self._renewing = asyncio.Event()
            self._child.send(signal.SIGTERM)
            await renewed.wait()

    def send(self, number: signal.Signals) -> None:
        drains, self._renewing = self._renewing is not None, None
        self._stopping = True
        if self._child is not None and not drains:  # a second signal would cut the drain short
            self._child.send(number)

    async def end(self, patience_s: float) -> int:
        """Wait for the end of the process.

        Sends SIGTERM unless that was done, and SIGKILL after `patience_s` seconds.

        Returns:
            0 if it ended cleanly, its exit code if it ended by itself, else 1.
        """
        child = self._child
        if child is None:
            return 0
        if not self._stopping and child.code is None:
            self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience_s):
                code = await child.ended()
        except TimeoutError:
            child.send(signal.SIGKILL)
            code = await child.ended()
        return code if code >= 0 else 1


@contextlib.asynccontextmanager
async def _kept(config: RouterConfig) -> "AsyncIterator[tuple[list[_Process], _Shutdown]]":
    """Yield the processes, not started yet, and their shutdown, within the parent's services."""
    with _reserved(config) as shared, _directory() as directory:
        keeper = ProcessSlot(config.processes, config.processes, directory, time.monotonic())
        places = [replace(keeper, number=number) for number in range(config.processes)]
        async with other_processes(keeper.others) as routers:
            metrics = MetricsAggregator(routers)
            processes = [_Process(place, shared) for place in places]
            end = _Shutdown(processes, routers)
            server = config.server
            with served(metrics.registry, server.host, server.metrics_port) as metrics_port:
                async with serving_handlers(keeper, {**metrics.handlers, **end.handlers}):
                    log.info(
                        "keeping %s",
                        kv(processes=len(places), sockets=directory, metrics_port=metrics_port),
                    )
                    try:
                        yield processes, end
                    finally:
                        end.close()


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """Yield a temporary directory that only this user can open."""
    try:
        made = tempfile.TemporaryDirectory(prefix="baton-router-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"--processes: no directory for the sockets of the router's processes: {error}; TMPDIR "
            "can name another place"
        ) from error
    with made as directory:
        yield directory


@contextlib.contextmanager
def _reserved(config: RouterConfig) -> Iterator[RouterConfig]:
    """Reserve the shared ports for the worker processes, and yield their configuration."""
    server = config.server
    with contextlib.ExitStack() as ports:
        port = ports.enter_context(rpc.reserved(server.host, server.port))
        http_port = ports.enter_context(
            rpc.reserved(server.host, config.http_port, flag="--http-port")
        )
        health_port = server.health_port
        if health_port is not None:
            health_port = ports.enter_context(
                rpc.reserved(server.host, health_port, flag=rpc.HEALTH_PORT)
            )
        ports_of_all = {"port": port, "health_port": health_port, "metrics_port": None}
        shared = server.model_copy(update=ports_of_all)
        yield config.model_copy(update={"server": shared, "http_port": http_port})


async def _unless(stop: asyncio.Event, what: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of a coroutine, or cancel it and return None when `stop` is set."""
    _, done = await first_of(stop.wait(), what)
    return None if stop.is_set() or done is None else done.result()


async def _first_byte(pipe: BinaryIO) -> bool:
    """Return whether a byte arrives before the end of file.

    There is no deadline: a process may download a model.
    """
    reader = asyncio.StreamReader()
    connected = asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    transport, _ = await connected
    try:
        return bool(await reader.read(1))
    finally:
        transport.close()
