"""Many connections at once that send nothing."""

import asyncio

from tests.attack.target import host_port


async def crowd_at(address: str, number: int, seconds: float) -> None:
    """Open as many connections as possible, and close them after this time."""
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
