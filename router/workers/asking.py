"""Queries to all processes of this router, in parallel and with a time limit.

A SiblingQuery answers for this process, and collects the answers of the others.

A process that does not answer in time is silent: its part is missing from the result, which says
how many are missing.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import aiohttp
import msgspec
from google.protobuf.message import Message
from yarl import URL

T = TypeVar("T")
M = TypeVar("M", bound=Message)

Tell = Callable[[Mapping[str, str]], Awaitable[bytes]]  # called with the query

LONGEST_S = 2.0  # as long as nodes have for Describe
_CONNECTIONS = 8  # to each process; further calls are queued


@dataclass(frozen=True, slots=True)
class SiblingReply:
    """Responses of the other processes.

    Attributes:
        bodies: responses by process number.
        num_asked: number of processes called.
    """

    bodies: Mapping[int, bytes]
    num_asked: int

    @property
    def num_silent(self) -> int:
        return self.num_asked - len(self.bodies)


class SiblingProcesses:
    """The other processes of this router. For one event loop. Made by `siblings`.

    Attributes:
        tells: this process's own answers for the others, by path.
    """

    def __init__(self, sessions: Mapping[int, aiohttp.ClientSession]) -> None:
        self._sessions = sessions
        self.tells: dict[str, Tell] = {}

    async def ask(self, path: str, longest_s: float = LONGEST_S, /, **query: str) -> SiblingReply:
        """Call all processes.

        Returns within `longest_s`. Raises nothing: failures count as silent.
        """
        url = URL.build(scheme="http", host="router", path=path, query=query)
        asked = (_body(one, url, longest_s) for one in self._sessions.values())
        answers = await asyncio.gather(*asked)
        numbered = zip(self._sessions, answers, strict=True)
        bodies = {number: body for number, body in numbered if body is not None}
        return SiblingReply(bodies, len(self._sessions))


class AnswerCodec(NamedTuple, Generic[T]):
    """The form of an answer between processes."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


def as_json(kind: Any) -> AnswerCodec[Any]:
    return AnswerCodec(msgspec.json.encode, msgspec.json.Decoder(kind).decode)


def as_message(kind: type[M]) -> AnswerCodec[M]:
    return AnswerCodec(kind.SerializeToString, kind.FromString)


class SiblingAnswers(NamedTuple, Generic[T]):
    """The answers of the other processes. `num_silent` have not answered in time."""

    answers: Sequence[T]
    num_asked: int

    @property
    def num_silent(self) -> int:
        return self.num_asked - len(self.answers)


class SiblingQuery(Generic[T]):
    """A query that each process of this router answers for itself. For one event loop."""

    def __init__(
        self,
        siblings: SiblingProcesses,
        path: str,
        own: Callable[..., T | Awaitable[T]],
        codec: AnswerCodec[T],
    ) -> None:
        """
        Args:
            path: unique among the queries.
            own: returns this process's answer. Called with the query.
        """
        self._siblings = siblings
        self._path = path
        self._own = own
        self._codec = codec
        siblings.tells[path] = self._tell

    async def ask(self, longest_s: float = LONGEST_S, /, **query: str) -> SiblingAnswers[T]:
        """Return the answers of all other processes, within `longest_s`. Raises nothing."""
        told = await self._siblings.ask(self._path, longest_s, **query)
        return SiblingAnswers([*map(self._codec.decode, told.bodies.values())], told.num_asked)

    async def _tell(self, query: Mapping[str, str]) -> bytes:
        answer: Any = self._own(**query)
        return self._codec.encode(await answer if inspect.isawaitable(answer) else answer)


@asynccontextmanager
async def siblings(sockets: Mapping[int, str]) -> AsyncIterator[SiblingProcesses]:
    """Open the connections to the other processes.

    Args:
        sockets: paths by process number. They need not exist yet.
    """
    async with AsyncExitStack() as open_sessions:
        sessions = {
            number: await open_sessions.enter_async_context(_session(socket))
            for number, socket in sockets.items()
        }
        yield SiblingProcesses(sessions)


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
