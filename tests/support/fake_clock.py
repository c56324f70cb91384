"""A clock for tests."""

from dataclasses import dataclass


@dataclass
class FakeClock:
    """A clock that stands still unless the test moves it. Pass it as `clock`."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now
