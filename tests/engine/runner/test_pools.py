"""Pools: the location of a page in memory, and swaps between device and host."""

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from engine.batch.batch import PageCopies
from engine.kv_cache.kv import HostPool, KVPool, swap_in, swap_out
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.states import PagedKV

CPU = torch.device("cpu")
LAYOUT = KVLayout.of((PagedKV(2, 8),) * 3, 16, torch.bfloat16)


def test_a_page_is_one_contiguous_run_of_bytes_at_its_address():
    pool = KVPool(LAYOUT, 5, CPU)
    pool.tensor.zero_()
    for layer in pool.layers:
        layer[3].fill_(1.5)
    assert pool.page_bytes == 2 * 3 * 2 * 16 * 8 * 2 == LAYOUT.page_bytes
    assert pool.num_bytes == 5 * pool.page_bytes == pool.tensor.nbytes
    assert LAYOUT.token_bytes * 16 == pool.page_bytes
    raw = ctypes.string_at(pool.base_address, pool.num_bytes)
    one = torch.tensor([1.5], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    expected = bytearray(pool.num_bytes)
    expected[3 * pool.page_bytes : 4 * pool.page_bytes] = one * (pool.page_bytes // 2)
    assert raw == bytes(expected)


def test_layer_views_write_into_the_pool():
    pool = KVPool(LAYOUT, 4, CPU)
    pool.tensor.zero_()
    for layer, view in enumerate(pool.layers):
        view[2, 1, 0, 5] = layer + 1
    # The head is outermost in a page, then the layer.
    cells = pool.tensor.view(torch.bfloat16).view(4, 2, 3, 2, 16, 8)
    assert cells[2, 1, :, 0, 5, 0].tolist() == [1, 2, 3]
    assert int((cells != 0).sum()) == 3 * 8


def test_pools_in_host_memory_start_on_a_huge_page():
    assert KVPool(LAYOUT, 3, CPU).base_address % (2 << 20) == 0


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no kernel with huge pages"
)
def test_pools_in_host_memory_request_huge_pages():
    pool = KVPool(LAYOUT, 3, CPU)
    assert "hg" in _flags_of_the_mapping_at(pool.base_address)


def _flags_of_the_mapping_at(address):
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_a_pool_without_room_is_a_configuration_error():
    with pytest.raises(ConfigError, match="GiB"):
        KVPool(LAYOUT, 2**50, CPU)


def test_pages_are_restored_from_host_memory_unchanged():
    pool, host = KVPool(LAYOUT, 8, CPU), HostPool(LAYOUT, 6, CPU)
    pool.tensor.random_()
    before = pool.tensor.clone()
    out = PageCopies(np.array([7, 1, 2], np.int32), np.array([0, 4, 5], np.int32))
    swap_out(pool, host, out)
    pool.tensor.zero_()
    swap_in(pool, host, PageCopies(np.array([3, 4, 5], np.int32), out.host_pages))
    assert torch.equal(pool.tensor[[3, 4, 5]], before[[7, 1, 2]])
    assert not pool.tensor[[0, 1, 2, 6, 7]].any()
