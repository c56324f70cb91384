"""Short texts go first, long ones do not starve, and the waiting text is limited."""

import asyncio

import pytest

from api.text.tokenizer import LengthBatcher
from common.errors import Overloaded


class Queue:
    """One slot, which is in use. Records the order of its later users."""

    def __init__(self, max_waiting_bytes: int = 10_000_000) -> None:
        self.queue = LengthBatcher(1, max_waiting_bytes=max_waiting_bytes)
        self.had: list[str] = []

    async def taken(self) -> "Queue":
        await self.queue.acquire(1, 0.0)
        return self

    async def wait(self, name: str, num_bytes: int, arrived: float = 0.0) -> asyncio.Task[None]:
        async def use() -> None:
            await self.queue.acquire(num_bytes, arrived)
            self.had.append(name)
            self.queue.release()

        task = asyncio.create_task(use())
        await asyncio.sleep(0)  # it waits now
        return task


async def test_the_shortest_waiting_text_is_next():
    queue = await Queue().taken()
    waits = [await queue.wait(name, size) for name, size in (("c", 900), ("a", 20), ("b", 300))]
    assert queue.had == []
    queue.queue.release()
    await asyncio.gather(*waits)
    assert queue.had == ["a", "b", "c"]


async def test_a_long_text_does_not_starve():
    queue = await Queue().taken()
    long = await queue.wait("long", 1_000_000, arrived=0.0)
    soon = await queue.wait("soon", 1_000, arrived=1.0)
    late = await queue.wait("late", 1_000, arrived=10.0)
    queue.queue.release()
    await asyncio.gather(long, soon, late)
    assert queue.had == ["soon", "long", "late"]


async def test_text_over_the_limit_is_rejected_without_effect():
    queue = await Queue(max_waiting_bytes=1000).taken()
    first = await queue.wait("first", 900)
    with pytest.raises(Overloaded, match="900 bytes of text wait to be tokenized, 1000 allowed"):
        await queue.queue.acquire(101, 0.0)
    second = await queue.wait("second", 100)
    queue.queue.release()
    await asyncio.gather(first, second)
    third = await queue.wait("third", 1000)
    await third
    assert queue.had == ["second", "first", "third"]


async def test_a_cancelled_text_waits_no_longer():
    queue = await Queue(max_waiting_bytes=1000).taken()
    gone = await queue.wait("gone", 1000)
    gone.cancel()
    await asyncio.wait([gone])
    stays = await queue.wait("stays", 1000)
    queue.queue.release()
    await stays
    assert queue.had == ["stays"]


async def test_a_turn_granted_during_a_cancel_goes_to_the_next():
    queue = await Queue().taken()
    gone, next_ = await queue.wait("gone", 1), await queue.wait("next", 2)
    queue.queue.release()
    gone.cancel()
    async with asyncio.timeout(60.0):
        await next_
    assert queue.had == ["next"]
    assert gone.cancelled()
