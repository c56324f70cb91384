"""Limits of files and connections of a process."""

import resource
from collections.abc import Iterator

import pytest

from common.process.resources import ENOUGH, allow_many

FILES = resource.RLIMIT_NOFILE


@pytest.fixture
def hard() -> Iterator[int]:
    """Yield the hard limit of this process. Restores both limits afterwards."""
    before = resource.getrlimit(FILES)
    yield before[1]
    resource.setrlimit(FILES, before)


# Seen failing with `allow_many` doing nothing.
def test_a_low_limit_is_raised(hard: int) -> None:
    resource.setrlimit(FILES, (512, hard))
    allow_many()
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    assert resource.getrlimit(FILES) == (wanted, hard)


def test_a_limit_that_is_as_high_as_can_be_stays(hard: int) -> None:
    resource.setrlimit(FILES, (hard, hard))
    allow_many()
    assert resource.getrlimit(FILES) == (hard, hard)
