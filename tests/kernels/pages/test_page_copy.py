"""Copies of whole pages between two pools."""

import math

import pytest
import torch

from kernels.pages import copy as page_copy
from kernels.pages.copy import copy_pages
from tests.kernels.conftest import check_refused

PAGES = [
    ([], []),
    ([3], [0]),
    ([1, 2, 3], [4, 5, 6]),  # one run
    ([1, 2, 3], [6, 5, 4]),
    ([0, 1, 5, 6, 7, 2], [2, 3, 4, 6, 7, 0]),  # runs that end on either side
]


@pytest.mark.parametrize("sources, targets", PAGES)
def test_exactly_the_named_pages_are_copied(sources, targets):
    source = torch.randn(9, 2, 3)
    target = torch.full((8, 2, 3), math.nan)
    copy_pages(source, ids(sources), target, ids(targets))
    for page in range(8):
        if page in targets:
            assert torch.equal(target[page], source[sources[targets.index(page)]])
        else:
            assert target[page].isnan().all()


def test_a_long_run_is_copied_in_pieces(monkeypatch):
    """Pieces of ten numbers, which are pages of six and parts of pages."""
    monkeypatch.setattr(page_copy, "MAX_COPY_BYTES", 40)
    source, target, sizes = torch.randn(9, 2, 3), torch.zeros(9, 2, 3), []
    copy = torch.Tensor.copy_

    def noted(into, part, **options):
        sizes.append(part.numel())
        return copy(into, part, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    copy_pages(source, ids([1, 2, 3, 7]), target, ids([4, 5, 6, 0]))
    assert sizes == [10, 8, 6]
    assert torch.equal(target[4:7], source[1:4]) and torch.equal(target[0], source[7])


def test_pools_of_different_pages_are_rejected():
    one = torch.zeros(2, 4)
    check_refused("pages differ", copy_pages, one, ids([0]), torch.zeros(2, 5), ids([0]))
    check_refused("pages differ", copy_pages, one, ids([0]), one.half(), ids([0]))
    check_refused("page ids", copy_pages, one, ids([0]), one.clone(), ids([0, 1]))


def ids(pages):
    return torch.tensor(pages, dtype=torch.int32)
