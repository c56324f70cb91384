"""Connections that say nothing at all, many at once."""

import asyncio

from tests.attack.target import host_port


async def crowd_at(address: str, number: int, seconds: float) -> None:
    """Opens as many of them as it can, and lets go of them after so long."""
    host, port = host_port(address)
    crowd = await asyncio.gather(
        *(asyncio.open_connection(host, port) for _ in range(number)), return_exceptions=True
    )
    try:
        await asyncio.sleep(seconds)
    finally:
        for end in crowd:
            if not isinstance(end, BaseException):
                end[1].transport.abort()
