"""Running requests that move on: nodes that each have both ends of a move. What joins at a node
runs there as a submission of its own, with a ticket of its own, which another node may ask for.

A request's first ticket is 1, or 2 where there are two of them; each move adds 2.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.config import TransferConfig
from tests.kvtransfer.live_sides import Kv, LivePlan, SourceSide, TargetSide, bank_pages
from tests.kvtransfer.node import Node
from tests.kvtransfer.sides import Input, Output, require
from tests.kvtransfer.world import Simulation, Step, World

REQUESTS = 2


class Stop(NamedTuple):
    """A node on the way.

    runs: the ticket of what runs here from the start.
    asks: the ticket that is to move here, and the node where it runs then.
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
    """came: tokens of a request that has joined, and is not in the node's books yet; or none."""

    came = 0

    def _joins(self, num_tokens: int) -> None:
        self.came = num_tokens

    def arrival(self) -> int:
        came, self.came = self.came, 0
        return came


class Roamer(Node):
    """Both ends over one pool.

    Each submission that runs here, and each mover from its grant on, has all the pages that it may
    grow into.

    Args:
        rooms: for how many such there are pages.
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
        """Fork both ends: a request that joins at one end begins at the other."""
        super().fork(*self._ends)

    def react(self, name: str, given: Input) -> list[Output]:
        outputs = super().react(name, given)
        num_tokens = self.consumer.arrival()
        if num_tokens:
            self.producer.begin(self.consumer.asks + REQUESTS, num_tokens)
        return outputs

    def moves(self) -> list[Input]:
        """Return the possible moves. A request that needs a slot waits for it and holds nothing
        meanwhile."""
        full = self._taken() >= self._rooms
        waiting = ("grant", "return", "compute anew") if full else ()
        return [move for move in super().moves() if move[1] not in waiting]

    def _taken(self) -> int:
        """Rooms in which something is: those of submissions, and what is lent of those that have
        ended; and of movers."""
        requests = self.producer.beneath.requests.values()
        pages = {r.pages[0] for r in requests if r.kv is not Kv.AWAY} | {
            *self.producer.beneath.lent
        }
        banks = {page // bank_pages(self.producer.plan.tables) for page in pages}
        return len(banks) + len(self.consumer.reads)

    def faults(self) -> list[Input]:
        """Without replays, which are submissions that nothing here asks for."""
        return [fault for fault in super().faults() if "replay" not in fault]

    def running(self) -> Iterator[int]:
        """Tickets of what decodes here."""
        return (ticket for ticket in self.producer.beneath.requests if self.producer.runs(ticket))


class RoamingSimulation(Simulation):
    """ran: nodes, and tickets of what has been seen to decode there."""

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
