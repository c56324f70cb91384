"""The choices of a request are started a few at a time."""

import asyncio
from functools import partial

import pytest

from api.requests.generate_params import all_of

NUM_CHOICES = 128


async def test_other_tasks_run_between_the_starts_of_choices():
    """Failed before: all choices of a request started in one turn of the event loop."""
    started: list[int] = []
    seen: set[int] = set()

    async def choice(number: int) -> int:
        started.append(number)
        return number

    async def other() -> None:
        while len(started) < NUM_CHOICES:
            seen.add(len(started))
            await asyncio.sleep(0)

    watching = asyncio.create_task(other())
    results = await all_of([partial(choice, number) for number in range(NUM_CHOICES)])
    await watching
    assert results == list(range(NUM_CHOICES))
    assert len(seen) >= NUM_CHOICES // 16


async def test_choices_that_were_not_started_yet_never_start_after_an_error():
    started: list[int] = []

    async def choice(number: int) -> None:
        started.append(number)
        if number == 0:
            raise ValueError("the first choice failed")

    with pytest.raises(ValueError, match="the first choice failed"):
        await all_of([partial(choice, number) for number in range(NUM_CHOICES)])
    assert len(started) < NUM_CHOICES
