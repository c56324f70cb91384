"""Streams that share the socket to an engine process that does not read.

Each seen failing: without either half of CallLane._is_full, if every lane is full while anything
waits, without the error for an engine that reads nothing, and without `_caught_up` set when the
connection is closed.
"""

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import msgspec
import pytest

from common.process.ipc import CallLane, FrameConnection, socket_pair
from common.process.resources import ENOUGH, allow_many


class Note(msgspec.Struct, frozen=True, tag=True):
    body: bytes


MIB = Note(bytes(1 << 20))


@dataclass
class Ends:
    front: FrameConnection[Note]
    engine: FrameConnection[Note]
    heard: list[Note]
    ended: list[str]  # why the front's end has ended

    def read(self, on: bool) -> None:
        """Set whether the engine reads."""
        transport = self.engine._transport
        assert transport is not None
        transport.resume_reading() if on else transport.pause_reading()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ours, theirs = socket_pair()
    heard: list[Note] = []
    ended: list[str] = []
    front: FrameConnection[Note] = FrameConnection(Note, lambda _: None, ended.append)
    engine: FrameConnection[Note] = FrameConnection(Note, heard.append, lambda _: None)
    await front.open(ours)
    await engine.open(theirs)
    yield Ends(front, engine, heard, ended)
    front.close()
    engine.close()


async def room(lane: CallLane) -> bool:
    """Return whether the lane has capacity now."""
    waiting = asyncio.ensure_future(lane.room())
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    waiting.cancel()
    return bool(done)


async def test_a_sender_over_its_share_waits_and_others_continue(ends):
    ends.read(False)
    loud, quiet = CallLane(ends.front), CallLane(ends.front)
    num_sent = 0
    while await room(loud):
        loud.send(MIB)
        num_sent += 1
        assert num_sent < 10
    quiet.send(Note(b"beat"))
    assert await room(quiet)
    ends.read(True)
    await asyncio.wait_for(loud.room(), 60)
    async with asyncio.timeout(60):
        while len(ends.heard) <= num_sent:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await room(loud)


async def test_if_much_waits_in_all_lanes_together_no_sender_continues(ends):
    ends.read(False)
    for _ in range(70):
        CallLane(ends.front).send(MIB)
    assert not await room(CallLane(ends.front))


async def test_an_engine_that_reads_nothing_for_long_is_an_error(ends):
    ends.read(False)
    lane = CallLane(ends.front, stuck_s=0.05)
    for _ in range(8):
        lane.send(MIB)
    await asyncio.wait_for(lane.room(), 60)
    assert len(ends.ended) == 1 and "nothing was read for" in ends.ended[0]


async def test_no_sender_waits_for_an_engine_that_is_gone(ends):
    ends.read(False)
    lane = CallLane(ends.front)
    for _ in range(8):
        lane.send(MIB)
    waiting = asyncio.ensure_future(lane.room())
    await asyncio.sleep(0)
    ends.engine.close()
    await asyncio.wait_for(waiting, 60)
    assert len(ends.ended) == 1
    lane.send(MIB)  # no effect


# Descriptors --------------------------------------------------------------------------------------


FILES = resource.RLIMIT_NOFILE


@pytest.fixture
def hard() -> Iterator[int]:
    """Yield the hard limit of this process. Restores both limits afterwards."""
    before = resource.getrlimit(FILES)
    yield before[1]
    resource.setrlimit(FILES, before)


# Seen failing if `allow_many` does nothing.
def test_a_low_limit_is_raised(hard):
    resource.setrlimit(FILES, (512, hard))
    allow_many()
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    assert resource.getrlimit(FILES) == (wanted, hard)


def test_a_limit_at_its_maximum_is_unchanged(hard):
    resource.setrlimit(FILES, (hard, hard))
    allow_many()
    assert resource.getrlimit(FILES) == (hard, hard)
