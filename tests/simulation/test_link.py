"""Links between simulated nodes: reads, damaged pages, and their ends."""

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from common.errors import TransferError
from kvtransfer.backends.base import PoolRegion
from kvtransfer.messages import HandoffId
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.ports import PagesToRead
from kvtransfer.transfer.link import LinkClosed, LinkUp, ReadEnded
from simulation.cost import StepCost
from simulation.node.link import BACKEND, ReadPort, SimLinks
from simulation.node.pools import SharedPool, pool_directory

NUM_PAGES = 8
HANDOFF = HandoffId(1, 2, 3)
PAGES = PagesToRead(np.array([5, 1], np.int32), np.array([0, 7], np.int32), ())


class Rig:
    """A consumer, and the pool of a producer."""

    def __init__(self, tmp_path) -> None:
        directory = pool_directory(tmp_path / "pools")
        self.there, self.here = SharedPool(directory, NUM_PAGES), SharedPool(directory, NUM_PAGES)
        self.there.pages[:] = np.arange(100, 100 + NUM_PAGES)
        cost = StepCost.of("h100", "llama-3-8b")
        self.port = ReadPort(cost, 1 << 20, "tcp25", self.here.pages, directory)
        self.events = asyncio.Queue()

    def open(self, num_pages: int = NUM_PAGES, backend: str = BACKEND):
        region = PoolRegion(0, 1 << 20, num_pages)
        hello = PairHello.of(9, "127.0.0.1:1", {}, [region], 0)
        hello = replace(hello, paths=(DataPath(backend, self.there.name),))
        return SimLinks(self.port).open(hello, BACKEND, self.events.put_nowait)

    async def next(self, kind):
        event = await asyncio.wait_for(self.events.get(), 60)
        assert isinstance(event, kind), event
        return event


async def test_a_read_copies_pages_and_takes_its_modelled_time(tmp_path):
    rig = Rig(tmp_path)
    link = rig.open()
    link.post(HANDOFF, PAGES)
    up = await rig.next(LinkUp)
    assert (up.path, len(up.members)) == ("tcp", 1)
    ended = await rig.next(ReadEnded)
    assert rig.here.pages[[0, 7]].tolist() == [105, 101]
    assert ended.num_bytes == 2 << 20
    assert ended.seconds == pytest.approx(rig.port.cost.transfer_s(2 << 20, "tcp25"))


async def test_a_page_that_changes_while_it_is_read_is_damaged(tmp_path):
    rig = Rig(tmp_path)
    link = rig.open()
    await rig.next(LinkUp)
    link.post(HANDOFF, PAGES)
    states = [105]
    while rig.events.empty():
        states.append(states[-1] + 1)
        rig.there.pages[5] = states[-1]
        await asyncio.sleep(0)
    await rig.next(ReadEnded)
    assert int(rig.here.pages[0]) not in states
    assert rig.here.pages[7] == 101


async def test_a_closed_link_reports_its_reads_and_writes_nothing(tmp_path):
    rig = Rig(tmp_path)
    link = rig.open()
    await rig.next(LinkUp)
    link.post(HANDOFF, PAGES)
    link.close("the test ends")
    link.close("again")
    closed = await rig.next(LinkClosed)
    assert (closed.reason, closed.unfinished) == ("the test ends", (HANDOFF,))
    with pytest.raises(TransferError):
        link.post(HANDOFF, PAGES)
    assert not rig.here.pages.any() and rig.events.empty()


@pytest.mark.parametrize("wrong", [{"num_pages": 9}, {"backend": "tcp"}])
async def test_a_link_to_a_pool_that_is_not_as_described_closes(tmp_path, wrong):
    rig = Rig(tmp_path)
    link = rig.open(**wrong)
    link.post(HANDOFF, PAGES)
    assert (await rig.next(LinkClosed)).unfinished == (HANDOFF,)
