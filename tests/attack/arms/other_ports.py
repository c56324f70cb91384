"""Invalid bytes on the gRPC ports and on the metrics ports, and crowds on both."""

import asyncio
from random import Random

from tests.attack.connections import connected, crowd_at
from tests.attack.target import Target

NUM_WORKERS = 3

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


async def nonsense(target: Target, draw: Random) -> None:
    async with connected(_any(target, draw)) as (reader, writer):
        writer.write(draw.randbytes(draw.choice((1, 9, 500, 60_000))))
        await reader.read(4096)


async def frames(target: Target, draw: Random) -> None:
    """Send random HTTP/2 frames after a valid preface."""
    address = draw.choice((target.router, target.prefill, target.decode))
    async with connected(address) as (reader, writer):
        writer.write(_PREFACE + _SETTINGS)
        for _ in range(draw.randint(1, 200)):
            payload = draw.randbytes(draw.choice((0, 4, 5, 8, 300)))
            head = len(payload).to_bytes(3, "big") + bytes(
                (draw.randrange(11), draw.randrange(256))
            )
            writer.write(head + draw.choice((0, 1, 3, 5)).to_bytes(4, "big") + payload)
        await reader.read(4096)


async def crowd(target: Target, draw: Random) -> None:
    await crowd_at(_any(target, draw), 60, draw.uniform(0.5, 4.0))


async def half_a_scrape(target: Target, draw: Random) -> None:
    async with connected(draw.choice(target.metrics)) as (_, writer):
        writer.write(
            b"GET /metrics HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * draw.choice((0, 9, 9000))
        )
        await asyncio.sleep(draw.uniform(0.0, 3.0))


def _any(target: Target, draw: Random) -> str:
    return draw.choice((target.router, target.prefill, target.decode, *target.metrics))
