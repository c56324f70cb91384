"""Every kernel test: fixed random numbers, and memory that is NaN until it is written."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan() -> Iterator[None]:
    """torch fills what `empty` returns while it is deterministic: unwritten output then fails."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
