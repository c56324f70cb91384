"""Queries to the other processes of this router, in parallel and with a time limit.

A process that does not answer in time is silent: its part is missing from the result, which says
how many are missing.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
from yarl import URL

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
    """The other processes of this router. For one event loop. Made by `siblings`."""

    def __init__(self, sessions: Mapping[int, aiohttp.ClientSession]) -> None:
        self._sessions = sessions

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
