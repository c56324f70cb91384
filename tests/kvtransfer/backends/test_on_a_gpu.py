"""Properties of pages in GPU memory that only a GPU shows. The conformance tests of all backends
run on it as well."""

import time

import numpy as np
import pytest
import torch
import xxhash

from kvtransfer.backends.base import PagePool
from kvtransfer.backends.device_memory import cuda_device
from kvtransfer.protocol.actions import PageSum
from kvtransfer.transfer.device_page_bytes import page_bytes_of
from kvtransfer.transfer.paths import PageChecksums
from tests.support.network.data_children import CUDA, CudaMemory, make_backend, scattered
from tests.support.network.data_ends import closing, wait_for

pytestmark = pytest.mark.gpu

NUM_PAGES, PAGE_BYTES = 512, 65536
ALL = np.arange(NUM_PAGES, dtype=np.int32)
GIB = 1 << 30


@pytest.fixture(params=["nixl-cuda", "tcp-cuda"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl-cuda":
        request.getfixturevalue("one_sided")
    return str(request.param)


def test_the_device_of_a_pool_is_detected():
    tensor = torch.arange(48, dtype=torch.uint8, device=CUDA).view(3, 16)
    view = cuda_device(CUDA).view(PagePool(tensor.data_ptr(), 16, 3, CUDA))
    view[1] = 7
    torch.cuda.synchronize()
    assert torch.equal(tensor[1], torch.full((16,), 7, dtype=torch.uint8, device=CUDA))
    assert view.data_ptr() == tensor.data_ptr()


def test_pages_are_compared_while_a_forward_runs():
    """Compute page sums without waiting for a forward or for any work on the default stream."""
    memory = CudaMemory(NUM_PAGES, PAGE_BYTES)
    content = np.random.default_rng(0).integers(0, 256, (NUM_PAGES, PAGE_BYTES), np.uint8)
    memory.pages[:] = torch.from_numpy(content)
    torch.cuda.synchronize()
    sums = PageChecksums(page_bytes_of(memory.pool), 1)
    sums.take([0])
    torch.cuda._sleep(4_000_000_000)  # about 2 s
    asleep = torch.cuda.Event()
    asleep.record()
    taken = sums.take(range(NUM_PAGES))
    assert not asleep.query()
    assert [checksum for _, checksum in taken] == [
        xxhash.xxh3_64_intdigest(page) for page in content
    ]
    memory.pages[3, 5] ^= 1
    torch.cuda.synchronize()
    assert sums.wrong([PageSum(page, 0, checksum) for page, checksum in taken]) == [3]


@pytest.mark.usefixtures("one_sided")
def test_two_processes_on_one_device_use_cuda_ipc(ends):
    producer = ends.far_producer("nixl-cuda", 64, 4 << 20)
    connection = ends.connect(make_backend("nixl-cuda"), producer, CudaMemory(64, 4 << 20))
    assert connection.path == "cuda_ipc"
    assert connection.probe() > 2.0


@pytest.mark.two_gpu
@pytest.mark.usefixtures("one_sided")
def test_pages_are_read_between_two_devices(ends, name):
    producer = ends.far_producer(name, NUM_PAGES, PAGE_BYTES)
    producer.publish_all()
    memory = CudaMemory(NUM_PAGES, PAGE_BYTES, "cuda:1")
    connection = ends.connect(make_backend(name), producer, memory)
    assert connection.path in ("nvlink", "cuda_ipc", "tcp")
    source, destination = scattered(0, NUM_PAGES, NUM_PAGES)
    connection.copy(source, destination)
    assert (memory.pages[destination] == producer.content[source]).all()


def test_a_forward_launched_after_a_copy_reads_its_pages(ends, name):
    producer = ends.far_producer(name, NUM_PAGES, PAGE_BYTES)
    producer.publish_all()
    memory = CudaMemory(NUM_PAGES, PAGE_BYTES)
    connection = ends.connect(make_backend(name), producer, memory)
    pages = cuda_device(CUDA).view(memory.pool)
    expected = torch.from_numpy(producer.content).to(CUDA)
    torch.cuda.synchronize()
    forward = torch.cuda.Stream(CUDA)
    for seed in range(50):
        source, destination = scattered(seed, NUM_PAGES, 256)
        there, here = (torch.from_numpy(ids).long().to(CUDA) for ids in (source, destination))
        torch.cuda.synchronize()
        connection.copy(source, destination)
        with torch.cuda.stream(forward):
            right = (pages[here] == expected[there]).all()
        forward.synchronize()
        assert bool(right)


# A staged copy on the default stream would wait for the sleep.
def test_copies_wait_for_no_forward(ends, name):
    producer = ends.far_producer(name, NUM_PAGES, PAGE_BYTES)
    producer.publish_all()
    connection = ends.connect(make_backend(name), producer, CudaMemory(NUM_PAGES, PAGE_BYTES))
    connection.copy(ALL, ALL)
    started = time.monotonic()
    with torch.cuda.stream(torch.cuda.Stream(CUDA)):
        torch.cuda._sleep(4_000_000_000)  # about 2 s
    torch.cuda._sleep(4_000_000_000)
    connection.copy(ALL, ALL)
    copied_s = time.monotonic() - started
    torch.cuda.synchronize()
    slept_s = time.monotonic() - started
    assert copied_s < slept_s / 2


# Without `MappedMemory`, or with UCX's cache, it remains used until the consumer ends.
@pytest.mark.usefixtures("one_sided")
def test_memory_of_a_failed_producer_is_free_when_its_connection_is_closed(ends):
    producer = ends.far_producer("nixl-cuda", 2048, 1 << 20)
    memory = CudaMemory(2048, 1 << 20)
    backend = make_backend("nixl-cuda")
    with closing(backend.connect(producer.admit(), producer.remote, memory.pool)) as connection:
        connection.copy(*scattered(0, 2048, 2048))
        taken, _ = torch.cuda.mem_get_info(0)
        producer.end()
    # Other processes that start may have taken some of the 2 GiB.
    wait_for(lambda: torch.cuda.mem_get_info(0)[0] - taken > 1.2 * GIB)
