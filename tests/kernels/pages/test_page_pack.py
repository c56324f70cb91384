"""Slices of pages packed and unpacked: exactly the named bytes are moved."""

import pytest
import torch

from kernels.pages.pack import pack_pages, unpack_pages
from tests.kernels.conftest import DEVICE, check_refused

POISON = 0xA5


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def ids(pages):
    return torch.tensor(pages, dtype=torch.int32, device=DEVICE)


# Whole pages, the first and last heads, one vector, and slices larger than a program's block.
SLICES = [(64, 0, 64), (96, 0, 48), (96, 48, 48), (1040, 1024, 16), (16, 0, 16), (20528, 32, 16432)]
PAGES = [[], [2], [4, 0, 3], [1, 1]]


@pytest.mark.parametrize("page_bytes, offset, slice_bytes", SLICES)
@pytest.mark.parametrize("pages", PAGES)
def test_packing_copies_exactly_the_named_slices(
    implementation, page_bytes, offset, slice_bytes, pages
):
    pool = random_bytes(5, page_bytes)
    before = pool.clone()
    memory = torch.full((len(pages) + 1, slice_bytes), POISON, dtype=torch.uint8, device=DEVICE)
    pack_pages(pool, ids(pages), memory[: len(pages)], offset=offset)
    for row, page in enumerate(pages):
        assert torch.equal(memory[row], before[page, offset : offset + slice_bytes])
    assert (memory[len(pages)] == POISON).all()
    assert torch.equal(pool, before)


@pytest.mark.parametrize("page_bytes, offset, slice_bytes", SLICES)
@pytest.mark.parametrize("pages", PAGES[:-1])
def test_unpacking_changes_exactly_the_named_slices(
    implementation, page_bytes, offset, slice_bytes, pages
):
    pool, packed = random_bytes(5, page_bytes), random_bytes(len(pages), slice_bytes)
    expected = pool.clone()
    for row, page in enumerate(pages):
        expected[page, offset : offset + slice_bytes] = packed[row]
    unpack_pages(packed, pool, ids(pages), offset=offset)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    "pool, pages, packed, offset, reason",
    [
        pytest.param((5, 64), [0, 1], (1, 64), 0, "do not fit", id="a page too many"),
        pytest.param((5, 64), [0], (1, 80), 0, "within a page", id="a slice longer than a page"),
        pytest.param((5, 64), [0], (1, 64), 16, "within a page", id="a slice that leaves the page"),
        pytest.param((5, 64), [0], (1, 32), -16, "within a page", id="a slice before the page"),
        pytest.param((5, 64), [0], (1, 16), 8, "multiples", id="an offset between vectors"),
        pytest.param((5, 64), [0], (1, 24), 0, "multiples", id="a slice of broken vectors"),
        pytest.param((5, 72), [0], (1, 16), 0, "multiples", id="a page of broken vectors"),
        pytest.param((5, 2, 32), [0], (1, 64), 0, "pool", id="a pool of three dimensions"),
        pytest.param((5, 64), [[0]], (1, 64), 0, "pages", id="ids of two dimensions"),
        pytest.param((5, 64), [0], (64,), 0, "packed", id="packed of one dimension"),
    ],
)
def test_wrong_shapes_are_rejected(pool, pages, packed, offset, reason):
    pool, packed = random_bytes(*pool), random_bytes(*packed)
    check_refused(reason, pack_pages, pool, ids(pages), packed, offset=offset)
    check_refused(reason, unpack_pages, packed, pool, ids(pages), offset=offset)


def test_wrong_dtypes_strides_and_alignments_are_rejected():
    pool, packed = random_bytes(5, 64), random_bytes(2, 64)
    check_refused("pool", pack_pages, pool.view(torch.int8), ids([0, 1]), packed)
    check_refused("pool", pack_pages, random_bytes(64, 5).t(), ids([0, 1]), packed)
    check_refused("int32", pack_pages, pool, ids([0, 1]).long(), packed)
    check_refused("packed", pack_pages, pool, ids([0, 1]), random_bytes(4, 64)[::2])
    misaligned = random_bytes(129)[1:].view(2, 64)
    check_refused("multiples of 16", pack_pages, pool, ids([0, 1]), misaligned)


@pytest.mark.gpu
@pytest.mark.parametrize("page_bytes, slice_bytes", [(1 << 16, 1 << 16), (917504, 458752)])
def test_packing_and_unpacking_at_real_sizes_changes_nothing(page_bytes, slice_bytes):
    pool = random_bytes(3000, page_bytes)  # beyond 2**31 bytes in the second case
    pages = torch.randperm(3000, device=DEVICE)[:700].int()
    packed = torch.empty(700, slice_bytes, dtype=torch.uint8, device=DEVICE)
    offset = page_bytes - slice_bytes
    pack_pages(pool, pages, packed, offset=offset)
    assert torch.equal(packed, pool[pages.long(), offset:])
    expected = pool.clone()
    expected[pages.long(), offset:] = packed.flip(0)
    unpack_pages(packed.flip(0), pool, pages, offset=offset)
    assert torch.equal(pool, expected)
