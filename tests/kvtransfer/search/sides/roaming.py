"""Requests that migrate repeatedly. Each node has both ends of a migration. A request that has
joined a node runs there as a new submission with its own ticket, which another node may request.

A request's first ticket is 1, or 2 for the second of two requests. Each migration adds 2.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.config import TransferConfig
from tests.kvtransfer.search.node import Node
from tests.kvtransfer.search.sides.hand_off import Input, Output, require
from tests.kvtransfer.search.sides.migration import Kv, LivePlan, SourceSide, TargetSide, bank_pages
from tests.kvtransfer.search.world import Simulation, Step, World

REQUESTS = 2


class Stop(NamedTuple):
    """A node on the route.

    Attributes:
        runs: the ticket of the request that runs here from the start.
        asks: the ticket that is to migrate to this node, and its current node.
    """

    runs: int | None = None
    asks: tuple[int, int] | None = None

    def tickets(self) -> Iterator[int]:
        """Yield the tickets of all requests that may run here."""
        if self.runs is not None:
            yield self.runs
        if self.asks is not None:
            yield self.asks[0] + REQUESTS


class ArrivalSide(TargetSide):
    """Attributes:
    came: tokens of a request that has joined and is not registered on the node yet, or none.
    """

    came = 0

    def _joins(self, num_tokens: int) -> None:
        self.came = num_tokens

    def arrival(self) -> int:
        came, self.came = self.came, 0
        return came


class Roamer(Node):
    """Both ends over one pool.

    Each submission that runs here, and each migration from its grant on, has all pages that it may
    need.

    Args:
        rooms: the number of requests for which there are pages.
    """

    consumer: ArrivalSide
    producer: SourceSide

    def __init__(
        self, live: LivePlan, config: TransferConfig, instance: int, stop: Stop, rooms: int
    ) -> None:
        moves_here = live if stop.asks else live._replace(movers=0)
        asks, _ = stop.asks or (0, 0)
        consumer = ArrivalSide(moves_here, config, instance, asks=asks)
        super().__init__(
            instance, consumer=consumer, producer=SourceSide(live, config, instance, runs=stop.runs)
        )
        self._rooms = rooms

    def fork(self, *names: str) -> None:
        """Fork both ends: a request that joins at one end starts at the other."""
        super().fork(*self._ends)

    def react(self, name: str, given: Input) -> list[Output]:
        outputs = super().react(name, given)
        num_tokens = self.consumer.arrival()
        if num_tokens:
            self.producer.begin(self.consumer.asks + REQUESTS, num_tokens)
        return outputs

    def moves(self) -> list[Input]:
        """Return the possible moves. A request that needs a slot waits for it without resources."""
        full = self._taken() >= self._rooms
        waiting = ("grant", "return", "compute anew") if full else ()
        return [move for move in super().moves() if move[1] not in waiting]

    def _taken(self) -> int:
        """Return how many rooms are in use: by submissions, by exported pages of ended ones, and
        by migrations."""
        requests = self.producer.beneath.requests.values()
        pages = {r.pages[0] for r in requests if r.kv is not Kv.AWAY} | {
            *self.producer.beneath.lent
        }
        banks = {page // bank_pages(self.producer.plan.tables) for page in pages}
        return len(banks) + len(self.consumer.reads)

    def faults(self) -> list[Input]:
        """Return the faults without replays: no node of this model requests a replayed
        submission."""
        return [fault for fault in super().faults() if "replay" not in fault]

    def running(self) -> Iterator[int]:
        """Return the tickets of requests that decode here."""
        return (ticket for ticket in self.producer.beneath.requests if self.producer.runs(ticket))


class RoamingSimulation(Simulation):
    """Attributes:
    ran: nodes, and tickets of requests that have decoded there.
    """

    def __init__(
        self, live: LivePlan, config: TransferConfig, way: Sequence[Stop], rooms: int
    ) -> None:
        nodes = [Roamer(live, config, 100 * n + 101, stop, rooms) for n, stop in enumerate(way)]
        dials = [(n, stop.asks[1]) for n, stop in enumerate(way) if stop.asks]
        super().__init__(nodes, dials, live.only_faults)
        self.ran: set[tuple[int, int]] = set()

    def after(self, world: World, step: Step) -> World:
        after = super().after(world, step)
        running = [(n, t) for n, node in enumerate(self.nodes(after)) for t in node.running()]
        requests = {ticket % REQUESTS for _, ticket in running}
        require(len(requests) == len(running), "two nodes run a request")
        self.ran.update(running)
        return after
