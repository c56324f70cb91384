"""The choice of pages that are compared by checksums, and the errors found."""

import pytest

from common.errors import TransferError
from kvtransfer.protocol.actions import PageSum
from kvtransfer.transfer import device_page_bytes
from kvtransfer.transfer.device_page_bytes import DevicePageBytes, page_bytes_of
from kvtransfer.transfer.paths import PageChecksums
from tests.support.hardware.device_twin import DeviceTwin
from tests.support.network.data_children import Memory, content

PAGE_BYTES, NUM_PAGES = 256, 64


@pytest.fixture
def memory() -> Memory:
    memory = Memory(NUM_PAGES, PAGE_BYTES)
    memory.pages[:] = content(7, NUM_PAGES, PAGE_BYTES)
    return memory


def test_all_pages_or_none_can_be_chosen(memory):
    pages = list(range(NUM_PAGES))
    assert [place for place, _ in PageChecksums(page_bytes_of(memory.pool), 1).take(pages)] == pages
    assert PageChecksums(page_bytes_of(memory.pool), 0).take(pages) == ()


def test_the_configured_share_of_pages_is_chosen(memory):
    """Whatever the ranges of publications are. Over time every page is chosen."""
    sums, num_taken, seen = PageChecksums(page_bytes_of(memory.pool), 8), 0, set()
    for start in range(0, 32_000, 5):
        pages = [(start + i) % NUM_PAGES for i in range(5)]
        taken = sums.take(pages)
        assert [place for place, _ in taken] == sorted({place for place, _ in taken})
        num_taken += len(taken)
        seen |= {pages[place] for place, _ in taken}
    assert 3000 < num_taken < 5000
    assert len(seen) == NUM_PAGES


def test_a_single_wrong_bit_is_found_in_its_page(memory):
    sums = PageChecksums(page_bytes_of(memory.pool), 1)
    expected = [PageSum(place, 0, checksum) for place, checksum in sums.take(range(NUM_PAGES))]
    assert sums.wrong(expected) == []
    memory.pages[3, PAGE_BYTES - 1] ^= 1
    assert sums.wrong(expected) == [3]


def test_pages_of_a_device_are_compared_as_well(memory):
    device = DeviceTwin()
    in_its_memory = PageChecksums(DevicePageBytes(memory.pool, device), 1)
    taken = in_its_memory.take(range(NUM_PAGES))
    assert taken == PageChecksums(page_bytes_of(memory.pool), 1).take(range(NUM_PAGES))
    memory.pages[3, PAGE_BYTES - 1] ^= 1
    assert in_its_memory.wrong([PageSum(page, 0, checksum) for page, checksum in taken]) == [3]
    assert device.users.strays == []
    device.end()


def test_pages_of_a_device_are_enqueued_together_and_awaited_once(memory, monkeypatch):
    """The buffer holds five pages, so five are enqueued together."""
    monkeypatch.setattr(device_page_bytes, "_MOST_PAGES", 5)
    device = DeviceTwin()
    queue, added = device.queue("to host"), []
    wait = queue.wait_until_done

    def waits(number: int) -> None:
        added.append(queue.num_added)
        wait(number)

    monkeypatch.setattr(queue, "wait_until_done", waits)
    sums = PageChecksums(DevicePageBytes(memory.pool, device), 1)
    assert sums.take(range(12)) == PageChecksums(page_bytes_of(memory.pool), 1).take(range(12))
    assert added == [5, 10, 12]
    device.end()


def test_a_failed_device_has_no_checksums(memory):
    device = DeviceTwin()
    sums = PageChecksums(DevicePageBytes(memory.pool, device), 1)
    sums.take([1])
    device.queue("to host").fail("an illegal address")
    with pytest.raises(TransferError, match="an illegal address"):
        sums.take([2])
    device.end()
