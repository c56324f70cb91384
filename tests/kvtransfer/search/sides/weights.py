"""Weights that one node reads from another, window after window of pieces, as a pair for the
search. The protocol ends are the product's. The engines of both nodes are models.

A piece is a page of the pool, whatever the tables of KV are. The content of each page is tracked.
"""

from typing import Any, NamedTuple

import numpy as np

from common.config import TransferConfig
from common.request import Remaining
from kvtransfer.messages import HandoffId, Weights
from kvtransfer.ports import (
    CompletedEvent,
    FailCommand,
    FailedEvent,
    GrantCommand,
    GrantedEvent,
    OpenCommand,
    OpenedEvent,
    PublishCommand,
)
from tests.kvtransfer.search.node import Node
from tests.kvtransfer.search.sides.hand_off import (
    BANK,
    ENDED,
    FREE,
    Input,
    Output,
    Plan,
    SimulatedConsumer,
    SimulatedProducer,
    require,
)
from tests.kvtransfer.search.world import Simulation

Window = tuple[int, int]  # pieces [first, past)


class WeightPlan(NamedTuple):
    """The parameters of a search.

    Attributes:
        wanted: the windows that the consumer requests, all at once.
        whole: number of pieces of the weights.
        exports: pages of the producer for pieces.
        tables: windows of the tables of pages that KV has.
    """

    wanted: tuple[Window, ...] = ((0, 2),)
    whole: int = 2
    exports: int = 8
    tables: tuple[int | None, ...] = (None,)
    state_pages: int = 0
    asynchronous: bool = False

    def plan(self) -> Plan:
        none = (0,) * len(self.wanted)
        return Plan(
            none,
            none,
            producer_pages=self.exports,
            windows=self.tables,
            state_pages=self.state_pages,
            asynchronous=self.asynchronous,
            late_producer=self.asynchronous,
        )


class Loan(NamedTuple):
    id: HandoffId
    first: int
    num_pieces: int
    pages: tuple[int, ...] = ()
    admitted: bool = False  # it has pages
    last_sent: bool = False


class ExporterSide(SimulatedProducer):
    """Its `prompts` are exports."""

    prompts: dict[int, Any]

    def __init__(self, plan: WeightPlan, config: TransferConfig, instance: int) -> None:
        super().__init__(plan.plan(), config, instance)
        self.weights = plan

    def _react(self, given: Input) -> list[Output]:
        match given:
            case ("restart", instance):
                self.__dict__.update(ExporterSide(self.weights, self.config, instance).__dict__)
                return []
        return super()._react(given)

    def _take(self, event: Any) -> list[Output]:
        match event:
            case OpenedEvent(source=Weights(first_piece, num_pieces, _)):
                require(event.serial not in self.prompts, "opened twice")
                self.prompts[event.serial] = Loan(event.id, first_piece, num_pieces)
                return []
            case GrantedEvent():
                return self._export(event.serial)
        return super()._take(event)

    def _export(self, serial: int) -> list[Output]:
        """Export as many pieces as there are pages for."""
        loan = self.prompts[serial]
        free = [page for page in range(self.weights.exports) if self.cells[page] == FREE]
        pages = tuple(free[: loan.num_pieces])
        if not pages:
            return self._posted(FailCommand(serial, "busy", retryable=True))
        for page in pages:
            self.cells[page] = "filling"
        self.prompts[serial] = loan._replace(pages=pages, admitted=True)
        return []

    def _next_chunk(self, serial: int) -> PublishCommand:
        loan = self.prompts[serial]
        num_pieces = max(0, min(len(loan.pages), self.weights.whole - loan.first))
        pages = loan.pages[:num_pieces]
        for place, page in enumerate(pages):
            self.cells[page] = ("piece", loan.first + place)
        self.prompts[serial] = loan._replace(last_sent=True)
        return PublishCommand(serial, 0, num_pieces, np.array(pages, np.int32), last=True)

    def _admit(self) -> list[Output]:
        return []  # a request without free pages is rejected


class TakerSide(SimulatedConsumer):
    """Its jobs are windows. `delivered` counts the lost pieces of one. An attempt is one
    hand-off."""

    def __init__(self, plan: WeightPlan, config: TransferConfig, instance: int) -> None:
        super().__init__(plan.plan(), config, instance)
        self.weights = plan
        self.windows = list(plan.wanted)

    def fork(self) -> "TakerSide":
        twin = super().fork()
        assert isinstance(twin, TakerSide)
        twin.windows = list(self.windows)
        return twin

    def key(self) -> Any:
        return super().key(), tuple(self.windows)

    def moves(self) -> list[Input]:
        jobs = enumerate(self.jobs)
        return self.waiting() + [
            ("ask", r) for r, job in jobs if job.state == "new" and self.producers
        ]

    def faults(self) -> list[Input]:
        """Return the faults. No window is cancelled and requested again."""
        return [fault for fault in super().faults() if fault[0] != "cancel"]

    def react(self, given: Input) -> list[Output]:
        match given:
            case ("ask", r):
                return self._ask(r)
        return super().react(given)

    def _ask(self, r: int) -> list[Output]:
        job, (first, past) = self.jobs[r], self.windows[r]
        held, id = self._held(), self._id(job)
        free = [page for page in range(r * BANK, (r + 1) * BANK) if page not in held]
        pages = self.reads[id] = tuple(free[: past - first])
        for page in pages:
            self.cells[page] = "reserved"
        self.jobs[r] = job._replace(state="granted", pages=pages)
        pieces, budget = Weights(first, past - first, 1), Remaining(self.plan.budget_s)
        commands = (
            OpenCommand(id, max(self.producers), b"", budget, pieces),
            GrantCommand(id, 0, np.array(pages, np.int32)),
        )
        return [output for command in commands for output in self._posted(command)]

    def _restart(self, instance: int) -> None:
        fresh = TakerSide(self.weights, self.config, instance)
        fresh.jobs = [ENDED] * len(self.jobs)  # the consumer must request them again
        self.__dict__.update(fresh.__dict__)

    def _take(self, event: Any) -> None:
        match event:
            case CompletedEvent(id, num_tokens=num_pieces):
                r = self._current(id)
                if r is not None:
                    self._arrived(r, num_pieces)
            case _:
                super()._take(event)

    def _arrived(self, r: int, num_pieces: int) -> None:
        """Record the first pieces of a window. The rest is requested again."""
        job, (first, past) = self.jobs[r], self.windows[r]
        require(num_pieces <= past - first, "more has come than was asked for")
        require(num_pieces > 0 or first >= self.weights.whole, "none has come of what there is")
        for place, page in enumerate(job.pages[:num_pieces]):
            right = ("piece", first + place)
            require(self.cells[page] == right, f"piece {first + place} is {self.cells[page]}")
        self.windows[r] = first + num_pieces, past
        again = 0 < num_pieces < past - first
        another = job._replace(state="new", attempt=job.attempt + 1, pages=())
        self._leave(r, another if again else ENDED)

    def _retry(self, r: int, lost: FailedEvent) -> None:
        job = self.jobs[r]
        somewhere = bool(self.producers) or lost.may_return
        again = lost.retryable and somewhere and job.delivered < self.plan.attempts
        another = job._replace(
            state="new", attempt=job.attempt + 1, delivered=job.delivered + 1, pages=()
        )
        self._leave(r, another if again else ENDED)


class WeightSimulation(Simulation):
    def __init__(self, plan: WeightPlan, config: TransferConfig) -> None:
        consumer = Node(101, consumer=TakerSide(plan, config, 101))
        super().__init__([consumer, Node(201, producer=ExporterSide(plan, config, 201))])
