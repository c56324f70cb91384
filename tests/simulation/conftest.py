"""Virtual time for tests of simulations."""

import time
from collections.abc import Iterator

import pytest

from simulation.virtual.clock import VirtualClock


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    """Virtual time in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("monotonic", "perf_counter", "monotonic_ns", "time"):
            patch.setattr(time, name, getattr(time, name))  # restored at the end
        clock = VirtualClock()
        clock.install()
        yield clock
