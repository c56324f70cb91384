"""The port that pages are read from over sockets: silence, nonsense, lies, and crowds."""

import asyncio
import struct
from random import Random

from tests.attack.target import Target, host_port

NUM_WORKERS = 3


async def nonsense(target: Target, draw: Random) -> None:
    reader, writer = await asyncio.open_connection(*host_port(target.data))
    try:
        await reader.read(20)
        for _ in range(draw.randint(1, 4)):
            writer.write(draw.randbytes(draw.choice((1, 7, 56, 4096))))
            await writer.drain()
            await asyncio.sleep(draw.uniform(0.0, 0.1))
        await reader.read(4096)
    finally:
        writer.transport.abort()


async def false_proof(target: Target, draw: Random) -> None:
    """An introduction of the right form that proves nothing."""
    reader, writer = await asyncio.open_connection(*host_port(target.data))
    try:
        await reader.readexactly(20)
        writer.write(struct.pack("<Q", draw.getrandbits(64)) + draw.randbytes(16 + 32))
        writer.write(struct.pack("<II", 0, 1) + struct.pack("<i", 0))
        await reader.read(4096)
    finally:
        writer.transport.abort()


async def silent_crowd(target: Target, draw: Random) -> None:
    crowd = await asyncio.gather(
        *(asyncio.open_connection(*host_port(target.data)) for _ in range(150)),
        return_exceptions=True,
    )
    try:
        await asyncio.sleep(draw.uniform(0.5, 4.0))
    finally:
        for end in crowd:
            if not isinstance(end, BaseException):
                end[1].transport.abort()


MOVES = {"nonsense": nonsense, "false proof": false_proof, "silent crowd": silent_crowd}
