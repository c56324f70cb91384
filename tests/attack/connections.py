"""Connections for any bytes, and many at once that send nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def connected(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection that is reset at the end."""
    reader, writer = await asyncio.open_connection(*_host_port(address))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def crowd_at(address: str, number: int, seconds: float) -> None:
    """Open as many connections as possible, and close them after this time."""
    crowd = await asyncio.gather(
        *(asyncio.open_connection(*_host_port(address)) for _ in range(number)),
        return_exceptions=True,
    )
    try:
        await asyncio.sleep(seconds)
    finally:
        for end in crowd:
            if not isinstance(end, BaseException):
                end[1].transport.abort()


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
