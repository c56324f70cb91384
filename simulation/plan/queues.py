"""Waiting times of queues, and the search for the root of a monotone function."""

import math
from collections.abc import Callable, Sequence

import msgspec

_BISECTIONS = 24  # to 1e-7 of the range


class Waiting(msgspec.Struct, frozen=True):
    """A waiting time: zero, or else exponential.

    Attributes:
        probability: that a request waits.
        mean: seconds of requests that wait.
    """

    probability: float
    mean: float

    def share_within(self, limit: float) -> float:
        """Return the share of requests that wait at most `limit` seconds."""
        if limit < 0:
            return 0.0
        return 1.0 if self.mean <= 0 else 1 - self.probability * math.exp(-limit / self.mean)


def waiting(servers: int, rate: float, service: float, variation: float) -> Waiting:
    """Return the wait in a queue with several servers (M/G/k by Allen and Cunneen).

    Args:
        rate: requests/s at all servers together, less than servers / service.
        service: mean seconds.
        variation: squared coefficient of variation of the service.
    """
    offered = rate * service
    blocked = 1.0  # Erlang's formula B, by its recursion over servers
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    busy = offered / servers
    probability = blocked / (1 - busy * (1 - blocked))
    return Waiting(probability, (1 + variation) / 2 * service / (servers * (1 - busy)))


def variation(values: Sequence[float]) -> float:
    """Return the squared coefficient of variation."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def percentile(share: float, wait: Waiting, services: Sequence[float]) -> float:
    """Return the time within which a share of requests is done, after its wait and its service."""

    def lacks(limit: float) -> bool:
        within = sum(wait.share_within(limit - service) for service in services)
        return within < share * len(services)

    longest = max(services)
    while lacks(longest):
        longest *= 2
    return highest(lacks, 0.0, longest)


def highest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the highest value between `low` and `high` for which a condition holds, which does
    not hold above it. Return `low` if it holds nowhere."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
