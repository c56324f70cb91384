"""Evacuation of a draining decode node: its requests migrate to other nodes, a few at a time."""

import asyncio

from router.cluster.decode_client import DecodeClient
from router.cluster.migratable import MigrationOutcome

MOST_AT_ONCE = 4  # per node: each is a separate read, and other requests run on
_LOOK_S = 0.05  # requests without a token cannot migrate yet; failed migrations may be retried


async def evacuate(client: DecodeClient) -> None:
    """Migrate requests whenever the node drains, until cancelled."""
    under_way: set[asyncio.Task[MigrationOutcome]] = set()
    while True:
        await client.draining.wait()
        under_way = {task for task in under_way if not task.done()}
        waiting = (guest for guest in tuple(client.guests) if guest.movable)
        for guest, _ in zip(waiting, range(MOST_AT_ONCE - len(under_way)), strict=False):
            under_way.add(guest.move())
        if under_way:
            await asyncio.wait(under_way, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(_LOOK_S)
