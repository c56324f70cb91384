"""Restart of child processes that die. Independent of the service they provide."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.process.children import ChildProcess
from node.frontend.process import exit_sentence


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """Restart delays in seconds."""

    first_s: float = 1.0  # from a crash to the restart; doubles with every crash in a row
    longest_s: float = 30.0
    steady_s: float = 60.0  # uptime after which a crash no longer counts as one in a row


async def keep_running(
    child: ChildProcess,
    start_again: Callable[[], ChildProcess],
    until_serving: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
    times: RestartTimes | None = None,
) -> None:
    """Watch a running process and restart it after each crash, until cancelled.

    Args:
        start_again: called after the previous process has ended.
        until_serving: returns once the newest process serves; cancelled if that one dies before.
        say: receives a line about each crash and each recovery.
    """
    times = times or RestartTimes()
    wait_s, began = times.first_s, time.monotonic()
    while True:
        code = await child.ended()
        if time.monotonic() - began >= times.steady_s:
            wait_s = times.first_s
        say(
            f"{child.name} {exit_sentence(code)} and is restarted in {wait_s:g} s. "
            f"Its log: {child.log}"
        )
        await asyncio.sleep(wait_s)
        wait_s, began = min(2 * wait_s, times.longest_s), time.monotonic()
        child = start_again()
        if await _serves(child, until_serving):
            say(f"{child.name} is back after {time.monotonic() - began:.1f} s")


async def _serves(child: ChildProcess, until_serving: Callable[[], Awaitable[None]]) -> bool:
    """Wait until the process serves. Returns False if it died first."""
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
