"""Waiting for the first of several coroutines."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any


async def first_of(
    *work: Awaitable[Any], longest_s: float | None = None
) -> Sequence[asyncio.Future[Any] | None]:
    """Run work concurrently until some of it ends, and cancel the rest.

    Args:
        longest_s: limit in seconds. None: no limit.

    Returns:
        A future for each work that has ended, and None for each that was cancelled, in order.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
        return [task if task.done() else None for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
