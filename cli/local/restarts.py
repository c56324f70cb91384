"""Programs that are started again when they die. Knows nothing of what they serve."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.process.children import Child
from node.frontend.process import exit_sentence


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """Seconds."""

    first_s: float = 1.0  # from a death to the next start; doubles with every death in a row
    longest_s: float = 30.0
    steady_s: float = 60.0  # who has lived so long has not died in a row


async def keep_running(
    child: Child,
    start_again: Callable[[], Child],
    until_serving: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
    times: RestartTimes | None = None,
) -> None:
    """Watches a running program, and its successors, until cancelled.

    Args:
        start_again: called once the one before has ended.
        until_serving: returns once the newest one serves; cancelled if that one dies before.
        say: takes a line about each death, and about each return.
    """
    times = times or RestartTimes()
    wait_s, began = times.first_s, time.monotonic()
    while True:
        code = await child.ended()
        if time.monotonic() - began >= times.steady_s:
            wait_s = times.first_s
        say(
            f"{child.name} {exit_sentence(code)}; it is started again in {wait_s:g} s. "
            f"Its log: {child.log}"
        )
        await asyncio.sleep(wait_s)
        wait_s, began = min(2 * wait_s, times.longest_s), time.monotonic()
        child = start_again()
        if await _serves(child, until_serving):
            say(f"{child.name} is back after {time.monotonic() - began:.1f} s")


async def _serves(child: Child, until_serving: Callable[[], Awaitable[None]]) -> bool:
    """Waits until it does, or has died: False."""
    serving = asyncio.ensure_future(until_serving())
    ended = asyncio.ensure_future(child.ended())
    tasks: tuple[asyncio.Future[None] | asyncio.Future[int], ...] = (serving, ended)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return not ended.done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
