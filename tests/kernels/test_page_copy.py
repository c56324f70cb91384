"""Whole pages between two pools."""

import math

import pytest
import torch

from kernels.pages.copy import copy_pages

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


def test_pools_of_different_pages_are_refused():
    one = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="pages differ"):
        copy_pages(one, ids([0]), torch.zeros(2, 5), ids([0]))
    with pytest.raises(ValueError, match="pages differ"):
        copy_pages(one, ids([0]), one.half(), ids([0]))
    with pytest.raises(ValueError, match="page ids"):
        copy_pages(one, ids([0]), one.clone(), ids([0, 1]))


def ids(pages):
    return torch.tensor(pages, dtype=torch.int32)
