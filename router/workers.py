"""The worker processes of one router: their sockets, and queries to each other.

Each process answers a ProcessQuery for itself and collects the answers of the others. The result
lacks a process that does not respond in time, and says how many are missing.
"""

import asyncio
import inspect
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from google.protobuf.message import Message
from yarl import URL

from common.errors import ConfigError, FailedPrecondition, NodeUnavailable

T = TypeVar("T")

ProcessHandler = Callable[[Mapping[str, str]], Awaitable[bytes]]  # called with the query

LONGEST_S = 2.0  # seconds, as for Describe calls to nodes
_CONNECTIONS = 8  # to each process; further calls are queued


@dataclass(frozen=True, slots=True)
class ProcessReplies(Generic[T]):
    """Responses of the other processes.

    Attributes:
        bodies: responses by process number. Processes that did not respond in time are missing.
        num_others: number of the other processes.
    """

    bodies: Mapping[int, T]
    num_others: int

    @property
    def answers(self) -> Sequence[T]:
        return [*self.bodies.values()]

    @property
    def num_silent(self) -> int:
        return self.num_others - len(self.bodies)


class OtherProcesses:
    """Client of the other processes of this router. For one event loop.

    Attributes:
        handlers: handlers that answer the other processes' calls here, by path.
    """

    def __init__(self, sessions: Mapping[int, aiohttp.ClientSession]) -> None:
        self._sessions = sessions
        self.handlers: dict[str, ProcessHandler] = {}

    async def ask(
        self, path: str, longest_s: float = LONGEST_S, /, **query: str
    ) -> ProcessReplies[bytes]:
        """Call all other processes in parallel, with a time limit in seconds.

        Raises nothing. A failed call counts as no response.
        """
        url = URL.build(scheme="http", host="router", path=path, query=query)
        bodies_of_all = (_body(one, url, longest_s) for one in self._sessions.values())
        answers = await asyncio.gather(*bodies_of_all)
        numbered = zip(self._sessions, answers, strict=True)
        bodies = {number: body for number, body in numbered if body is not None}
        return ProcessReplies(bodies, len(self._sessions))


class ProcessQuery(Generic[T]):
    """A query that every process of this router answers for itself. For one event loop."""

    def __init__(
        self,
        other_processes: OtherProcesses,
        path: str,
        own: Callable[..., T | Awaitable[T]],
        kind: Any,
    ) -> None:
        """Register the query.

        Args:
            path: path, unique among the queries.
            own: returns this process's answer. Called with the query parameters.
            kind: type of an answer: a protobuf message, or a type of JSON values.
        """
        self._others = other_processes
        self._path = path
        self._own = own
        is_message = isinstance(kind, type) and issubclass(kind, Message)
        self._encode = kind.SerializeToString if is_message else msgspec.json.encode
        self._decode = kind.FromString if is_message else msgspec.json.Decoder(kind).decode
        other_processes.handlers[path] = self._handle

    async def ask(self, longest_s: float = LONGEST_S, /, **query: str) -> ProcessReplies[T]:
        """Return the answers of all other processes, within `longest_s` seconds. Raises nothing."""
        replies = await self._others.ask(self._path, longest_s, **query)
        decoded = {number: self._decode(body) for number, body in replies.bodies.items()}
        return ProcessReplies(decoded, replies.num_others)

    async def _handle(self, query: Mapping[str, str]) -> bytes:
        answer: Any = self._own(**query)
        return self._encode(await answer if inspect.isawaitable(answer) else answer)


@asynccontextmanager
async def other_processes(sockets: Mapping[int, str]) -> AsyncIterator[OtherProcesses]:
    """Open connections to the other processes.

    Args:
        sockets: socket paths by process number. They need not exist yet.
    """
    async with AsyncExitStack() as open_sessions:
        sessions = {
            number: await open_sessions.enter_async_context(_session(socket))
            for number, socket in sockets.items()
        }
        yield OtherProcesses(sessions)


def _session(socket: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(socket, limit=_CONNECTIONS),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def _body(session: aiohttp.ClientSession, url: URL, longest_s: float) -> bytes | None:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=longest_s)) as answer:
            return await answer.read() if answer.ok else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


class ProcessSlot(msgspec.Struct, frozen=True):
    """Position of one process in its router.

    The sockets are in a directory that only its user can open. That is the only authentication.

    Attributes:
        number: number of this process, from 0. The parent process has the number `of`.
        of: number of worker processes.
        directory: directory of the sockets. Empty for a router with one process.
        began: start of the router in time.monotonic(), which all processes of a host share.
        again: this process replaces one that has ended.
    """

    number: int
    of: int
    directory: str
    began: float
    again: bool = False

    @property
    def is_shared(self) -> bool:
        return self.of > 1

    @property
    def socket(self) -> str:
        return self._socket(self.number)

    @property
    def others(self) -> dict[int, str]:
        """Sockets of the other worker processes, by number."""
        if not self.is_shared:
            return {}
        return {number: self._socket(number) for number in range(self.of) if number != self.number}

    @property
    def keeper(self) -> dict[int, str]:
        """Socket of the parent process, by its number."""
        return {self.of: self._socket(self.of)} if self.is_shared else {}

    def _socket(self, number: int) -> str:
        return os.path.join(self.directory, f"{number}.sock")


def alone() -> ProcessSlot:
    """Return the position of the only process of a router."""
    return ProcessSlot(0, 1, "", time.monotonic())


@asynccontextmanager
async def serving_handlers(
    place: ProcessSlot, handlers: Mapping[str, ProcessHandler]
) -> AsyncIterator[None]:
    """Answer calls of other processes while inside the context. Does nothing with one process.

    Raises:
        ConfigError: the socket cannot be opened.
    """
    if not place.is_shared:
        yield
        return
    app = web.Application()
    for path, handle in handlers.items():
        app.router.add_get(path, _handler(handle))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    try:
        try:
            await web.UnixSite(runner, place.socket).start()
        except OSError as error:
            raise ConfigError(
                f"--processes: no socket for the router's processes at {place.socket}: {error}; "
                "TMPDIR can name another directory"
            ) from error
        yield
    finally:
        await runner.cleanup()


def _handler(handle: ProcessHandler) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=await handle(request.query))

    return answer


PATH = "/drain"  # path of the call to the parent process
IN_TURN = "in_turn"  # query parameter, "yes" or "no"


# Begins a graceful shutdown. Called with `in_turn` of DrainRouterRequest. Raises ServingError.
Drain: TypeAlias = Callable[[bool], Awaitable[None]]


def local_drain(begin: Callable[[], None]) -> Drain:
    """Return the shutdown of a router with one process."""

    async def drain(in_turn: bool) -> None:
        if in_turn:
            raise FailedPrecondition(
                "this router has only one process: a rolling restart needs several (--processes)"
            )
        begin()

    return drain


def shared_drain(keeper: OtherProcesses) -> Drain:
    """Return the shutdown of a router with several processes, through their parent process."""

    async def drain(in_turn: bool) -> None:
        replies = await keeper.ask(PATH, **{IN_TURN: "yes" if in_turn else "no"})
        if replies.num_silent:
            raise NodeUnavailable("the parent process of this router does not respond")

    return drain
