"""Rates per second, from monotonic counters of nodes. Pure: uses only the nodes' own clocks."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protos.router_pb2 import ClusterNode

WINDOW_S = 4.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float  # the router's uptime
    values: Mapping[str, int]


@dataclass(slots=True)
class _Book:
    """The last samples of one instance of a node, oldest first."""

    instance: int
    samples: deque[_Sample] = field(default_factory=deque)


class Rates:
    """Rates by node address. A restarted node counts from zero, so its samples are discarded."""

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}

    def take(self, nodes: Sequence[ClusterNode]) -> None:
        """Add a sample of every node. Nodes missing from `nodes` are forgotten."""
        self._books = {
            node.address: self._taken(node) for node in nodes if node.state != "unreachable"
        }

    def of(self, address: str, counter: str) -> float | None:
        """Return the rate of a counter over the last seconds; "steps" is one too. None: not known
        yet."""
        book = self._books.get(address)
        if book is None or len(book.samples) < 2:
            return None
        first, last = book.samples[0], book.samples[-1]
        grown = last.values.get(counter, 0) - first.values.get(counter, 0)
        return max(0.0, grown / (last.at_s - first.at_s))

    def total(self, addresses: Sequence[str], counter: str) -> float | None:
        """Return the sum of the known rates, or None if none is known."""
        known = [rate for a in addresses if (rate := self.of(a, counter)) is not None]
        return sum(known) if known else None

    def _taken(self, node: ClusterNode) -> _Book:
        book = self._books.get(node.address)
        # A restarted router has another clock.
        if (
            book is None
            or book.instance != node.instance_id
            or (book.samples and book.samples[-1].at_s > node.seen_s)
        ):
            book = _Book(node.instance_id)
        samples = book.samples
        if not samples or samples[-1].at_s < node.seen_s:
            samples.append(_Sample(node.seen_s, {**node.counters, "steps": node.steps}))
        while len(samples) > 2 and samples[1].at_s <= node.seen_s - WINDOW_S:
            samples.popleft()
        return book
