"""The port from which pages are read over sockets: silence, invalid bytes, false proofs, and
crowds."""

import asyncio
import struct
from random import Random

from kvtransfer.backends.tcp.wire import INTRODUCTION, KEY_BYTES, MAGIC, REQUEST, FrameKind
from tests.attack.connections import connected, crowd_at
from tests.attack.target import Target

NUM_WORKERS = 3


async def nonsense(target: Target, draw: Random) -> None:
    async with connected(target.data) as (reader, writer):
        for _ in range(draw.randint(1, 4)):
            writer.write(draw.randbytes(draw.choice((1, 7, 56, 4096))))
            await writer.drain()
            await asyncio.sleep(draw.uniform(0.0, 0.1))
        await reader.read(4096)


async def false_proof(target: Target, draw: Random) -> None:
    """Send a well-formed introduction that proves nothing."""
    async with connected(target.data) as (reader, writer):
        number, count = draw.choice((1, 2, draw.getrandbits(64))), draw.getrandbits(64)
        writer.write(INTRODUCTION.pack(MAGIC, number, count, draw.randbytes(KEY_BYTES)))
        writer.write(REQUEST.pack(FrameKind.POOL, 1, 0, 1) + struct.pack("<i", 0))
        await reader.read(4096)


async def silent_crowd(target: Target, draw: Random) -> None:
    await crowd_at(target.data, 150, draw.uniform(0.5, 4.0))
