"""A live migration between two decode nodes, as a pair for the search. The protocol ends and the
bookkeeping of migrations are the product's. The parts around them are models.

The source runs one request, a step at a time. The router may lose its stream and replay the request
under another ticket. The source may retract the request: its pages are freed at once, and it
returns in other pages, from host memory or computed again. The target has migrations of the first
submission, and several of them if the router has migrated it twice. A request that has joined the
target releases its pages at once, like one that is retracted in the same turn. The model tracks KV
for each page of each table: the number of tokens, and the submission. It also tracks states, which
every step changes. A target that copies first reads whole pages of the running request as a prefix,
has them in its tree, and may evict them.
"""

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Self

import numpy as np

from common.config import TransferConfig
from common.page_tables import PageTables
from common.request import Remaining, RequestSpec
from common.requests.namespace import UNNAMED, Namespace, WeightsId
from common.requests.sampling import SamplingParams
from decode_node.outgoing_migrations import OutgoingMigrations
from decode_node.state import OutgoingMigration
from engine.batch.holding import NO_PAGE, PageHolding
from engine.kv_cache.pages import PageHolder
from engine.kv_cache.radix import PrefixMatch
from engine.scheduler.slot_owners import PausedRequest
from kvtransfer.messages import CancelHandoff, HandoffId, Live, Prefix, SampledOutput, Source
from kvtransfer.ports import (
    ClosedEvent,
    FailedEvent,
    FirstTokenEvent,
    GrantCommand,
    GrantedEvent,
    OpenCommand,
    OpenedEvent,
)
from node.request_state import Claims, Ending, RequestStage
from node.sharing.exports import PrefixExports
from tests.kvtransfer.search.node import Node
from tests.kvtransfer.search.sides.hand_off import (
    BANK,
    ENDED,
    FREE,
    PAGE_SIZE,
    SAMPLING,
    TORN,
    Input,
    Output,
    Plan,
    SimulatedConsumer,
    SimulatedProducer,
    require,
)
from tests.kvtransfer.search.world import Simulation, Step, World
from tests.support.specs import make_spec

FOR_EVER = 1e9


class LivePlan(NamedTuple):
    """The parameters of a search.

    Attributes:
        known: tokens that the router has when it submits the migration.
        most: number of tokens at which the request ends.
        room: number of tokens whose KV fits at the target.
        windows, state_pages: as in PageTables.
        copies: whether the target reads whole pages of the known tokens before it requests the
            rest.
    """

    known: int = 4
    most: int = 7
    room: int = 8
    movers: int = 1
    windows: tuple[int | None, ...] = (None,)
    state_pages: int = 0
    copies: bool = False
    # whether the engines handle events, and the ends handle commands, later
    asynchronous: bool = False
    only_faults: tuple[str, ...] = ()

    def plan(self) -> Plan:
        return Plan(
            (self.most,) * self.movers,
            (0,) * self.movers,
            windows=self.windows,
            state_pages=self.state_pages,
            asynchronous=self.asynchronous,
            late_producer=self.asynchronous,
            only_faults=self.only_faults,
        )


# The source


class Kv(Enum):
    """The location of a submission's KV.

    HERE --retract--> AWAY --return--> RETURNING --a launched step--> FILLING --finished--> HERE
                    `--------------computed again--------------------^
    """

    HERE = "in its pages"
    AWAY = "in host memory, or nowhere"
    RETURNING = "in host memory, and it has pages"
    FILLING = "written into its pages by a launched step"


def bank_pages(tables: PageTables) -> int:
    return BANK * (tables.num_tables + 1)


NAMED = make_spec([0], request_id="r")


@dataclass(eq=False)
class Running:
    """One submission of the request. Its tokens are 0, 1, 2, ...

    Attributes:
        launched: a step that computes its next token has been launched.
        bank: index of the bank that has its pages, of two.
    """

    key: int  # also its ticket
    num_tokens: int
    tables: PageTables
    in_batch: bool = True
    launched: bool = False
    kv: Kv = Kv.HERE
    bank: int = 0
    slot: int | None = 0
    outcome: str = ""  # "ended" | "moved"
    spec: RequestSpec = NAMED
    sampling: SamplingParams = SAMPLING
    weights: WeightsId = UNNAMED
    # The request's record on the node
    claims: Claims = field(default_factory=Claims)
    migration: OutgoingMigration | None = None
    queue: None = None

    @property
    def request(self) -> "Running":
        return self

    def move(self, stage: RequestStage, queue: None) -> None:
        pass

    def close(self, ending: Ending) -> None:
        self.claims.close()

    @property
    def runs(self) -> bool:
        """Return whether it runs. A request that has returned counts as retracted until a step
        that fills its pages has been launched."""
        return self.in_batch and self.kv is not Kv.RETURNING

    @property
    def holding(self) -> PageHolding:
        """Return its pages on the device."""
        tables = self.tables
        return (
            PageHolding.none(tables.num_tables)
            if self.kv is Kv.AWAY
            else self.holding_in(self.bank)
        )

    def holding_in(self, bank: int) -> PageHolding:
        """Return its pages in a table, including those of its next token. Each table has a part
        of its own."""
        tables, num_pages = self.tables, self.tables.num_pages(self.num_tokens)
        bank = (2 * ((self.key - 1) % 2) + bank) * bank_pages(tables)
        rows = np.arange(num_pages) + bank + BANK * np.arange(tables.num_tables)[:, None]
        for table in range(tables.num_tables):
            rows[table, : tables.live_from(table, self.num_tokens - 1)] = NO_PAGE
        state = np.arange(tables.state_pages) + bank + BANK * tables.num_tables
        return PageHolding(rows.astype(np.int32), state.astype(np.int32))

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(self.holding.flat().tolist())

    @property
    def places(self) -> Iterator[tuple[int, int, int]]:
        """Return (page, table, place) of each page. The state is the table after the last."""
        holding = self.holding
        for table, row in enumerate([*holding.tables.tolist(), holding.state.tolist()]):
            yield from ((page, table, place) for place, page in enumerate(row) if page != NO_PAGE)

    @property
    def written(self) -> list[tuple[int, int, int]]:
        """Return the places that its next step writes."""
        tail, state = (self.num_tokens - 1) // PAGE_SIZE, self.tables.num_tables
        return [each for each in self.places if each[1] == state or each[2] == tail]


@dataclass(eq=False)
class Beneath:
    """Fakes below OutgoingMigrations and PrefixExports: scheduler, pages, tree, active requests,
    port."""

    requests: dict[int, Running] = field(default_factory=dict)  # by ticket
    lent: list[int] = field(default_factory=list)
    posts: list[Any] = field(default_factory=list)
    learnt: bool = False  # the tree has the first submission's whole pages while it runs
    num_pages: int = 1  # many of which may be read by others

    # scheduler
    def tokens_of(self, request: Running) -> Any:
        return np.arange(request.num_tokens, dtype=np.int32) if request.runs else None

    def pause(self, request: Running) -> bool:
        runs = request.runs
        if runs:
            request.in_batch = False
        return runs

    def take_paused(self, request: Running) -> PausedRequest | None:
        if request.launched or request.kv is Kv.FILLING:
            return None
        return PausedRequest(np.arange(request.num_tokens, dtype=np.int32), request.holding)

    def publish_prefix(self, request: Running) -> bool:
        self.learnt = request.runs and request.kv is Kv.HERE
        return self.learnt

    def resume(self, request: Running) -> None:
        request.in_batch = True

    # tree: unused pages are evicted at once
    def match(self, token_ids: Any, namespace: Namespace) -> PrefixMatch:
        request = self.requests.get(1) if self.learnt else None
        num_kv = request.num_tokens - 1 if request is not None else 0
        num_pages = min(len(token_ids), num_kv) // PAGE_SIZE
        pages = np.empty((1, 0), np.int32) if request is None else request.holding.tables
        pages = pages[:, :num_pages]
        return PrefixMatch(num_pages * PAGE_SIZE, PageHolding(pages), pages)

    # pages
    def hold(self, pages: Any, holder: PageHolder) -> None:
        self.lent += pages.tolist()

    def drop(self, pages: Any, holder: PageHolder) -> None:
        for page in pages.tolist():
            self.lent.remove(page)

    # active requests, counters, port
    @property
    def counters(self) -> "Beneath":
        return self

    def by_ticket(self, ticket: int) -> Running | None:
        return self.requests.get(ticket)

    def count(self, name: str, number: int = 1) -> None:
        pass

    def post(self, command: Any) -> None:
        self.posts.append(command)

    def remove_migrated(self, request: Running) -> None:
        self.leave(request, "moved")

    def leave(self, request: Running, outcome: str) -> None:
        del self.requests[request.key]
        request.in_batch, request.slot, request.outcome = False, None, outcome


class SourceSide(SimulatedProducer):
    def __init__(
        self, live: LivePlan, config: TransferConfig, instance: int, *, runs: int | None = 1
    ) -> None:
        """Args:
        runs: the ticket of the request that runs here from the start.
        """
        super().__init__(live.plan(), config, instance)
        self.live = live
        self.beneath = Beneath()
        tables = self.plan.tables
        self.cells = [FREE] * (4 * bank_pages(tables))
        self.departures = OutgoingMigrations(
            scheduler=self.beneath,  # type: ignore[arg-type]
            pages=self.beneath,  # type: ignore[arg-type]
            tables=tables,
            page_bytes=1,
            port=self.beneath,
            active=self.beneath,  # type: ignore[arg-type]
        )
        self.loans = PrefixExports(
            enabled=True,
            cache=self.beneath,  # type: ignore[arg-type]
            pages=self.beneath,  # type: ignore[arg-type]
            tiers=None,
            tables=tables,
            port=self.beneath,
        )
        self.loans.learn_by(self.departures.copied)
        if runs is not None:
            self.begin(runs, live.known)

    def fork(self) -> Self:
        twin = super().fork()
        log = self.departures._log  # has a lock
        twin.departures, twin.beneath, twin.loans = copy.deepcopy(
            (self.departures, self.beneath, self.loans), {id(log): log}
        )
        return twin

    def key(self) -> Hashable:
        books = [
            (serial, d.state.key, d.num_known, d.stage, d.over, d.room_tokens, d.exported.tobytes())
            for serial, d in self.departures.in_progress.items()
        ]
        requests = [
            (r.key, r.num_tokens, r.in_batch, r.launched, r.kv, r.bank)
            for r in self.beneath.requests.values()
        ]
        refused = tuple(sorted(self.departures._refused))
        lent = [(serial, pages.tobytes()) for serial, pages in self.loans.pages_in_use.items()]
        loans = tuple(self.loans._asked), tuple(lent), self.beneath.learnt
        held = refused, tuple(self.beneath.lent)
        return (super().key(), tuple(books), tuple(requests), held, loans)

    @property
    def request(self) -> Running | None:
        """Return the newest submission, unless it has ended."""
        return next(reversed(self.beneath.requests.values()), None)

    def runs(self, ticket: int) -> bool:
        request = self.beneath.requests.get(ticket)
        if request is None:
            return False
        return request.in_batch or request.launched or request.kv is Kv.AWAY

    def moves(self) -> list[Input]:
        moves = self.waiting()
        for ticket, request in self.beneath.requests.items():
            moves += [(what, ticket) for what in self._steps(request)]
        return moves

    def _steps(self, request: Running) -> Iterator[str]:
        """Yield the next scheduler operations that are possible for the request."""
        if request.launched:
            yield "finish"
        elif request.kv is Kv.AWAY:
            pages = request.holding_in(1 - request.bank).flat().tolist()
            if not set(pages).intersection(self.beneath.lent):
                yield "return"
                yield "compute anew"
        elif request.in_batch:
            yield "launch"
        if request.kv is Kv.RETURNING:
            yield "launch others"
        if request.kv is Kv.FILLING and not request.launched:
            yield "finish others"

    def faults(self) -> list[Input]:
        faults: list[Input] = [("end", ticket) for ticket in self.beneath.requests]
        faults += [("retract", ticket) for ticket, r in self.beneath.requests.items() if r.runs]
        if 1 in self.beneath.requests:
            faults.append(("replay",))
        if any(d.paused_until < FOR_EVER for d in self.departures.in_progress.values()):
            faults.append(("pause is over",))
        return faults + self.ticks()

    def at_rest(self) -> bool:
        leaving = self.departures.in_progress or self.departures._refused
        held = self.beneath.lent or self.beneath.requests or leaving
        held = held or self.loans._asked or self.loans.pages_in_use
        return not (self._end.num_open or self.exposed or held)

    def react(self, given: Input) -> list[Output]:
        # Only the engine remembers serials of migrations, exports and refusals.
        known = self.departures.in_progress.keys() | self.departures._refused
        known |= self.loans._asked.keys() | self.loans.pages_in_use.keys()
        self.prompts = dict.fromkeys(known)  # type: ignore[arg-type]
        outputs = super().react(given)
        self.prompts = {}
        return outputs

    def _react(self, given: Input) -> list[Output]:
        match given:
            case ("launch", ticket):
                self._launch(self.beneath.requests[ticket])
            case ("finish", ticket):
                self._finish(self.beneath.requests[ticket])
            case ("launch others", ticket):  # its pages return, but not its row
                self.beneath.requests[ticket].kv = Kv.FILLING
            case ("finish others", ticket):
                self._filled(self.beneath.requests[ticket])
            case ("retract", ticket):
                request = self.beneath.requests[ticket]
                request.in_batch, request.kv = False, Kv.AWAY
                if ticket == 1:
                    self.beneath.learnt = False
            case ("return", ticket):
                self._return(self.beneath.requests[ticket])
            case ("compute anew", ticket):
                self._return(self.beneath.requests[ticket])
                self._launch(self.beneath.requests[ticket])
            case ("end", ticket):
                self._end_request(self.beneath.requests[ticket])
            case ("replay",):
                self._end_request(self.beneath.requests[1])
                self.begin(2, self.live.known)
            case ("pause is over",):
                self.departures.poll(FOR_EVER)
            case _:
                return super()._react(given)
        return self._turn()

    def _restarted(self, instance: int) -> Self:
        return type(self)(self.live, self.config, instance, runs=None)

    def _take(self, event: Any) -> list[Output]:
        of_loans = event.serial in self.loans._asked or event.serial in self.loans.pages_in_use
        of_loans |= isinstance(event, OpenedEvent) and isinstance(event.source, Prefix)
        producer = self.loans if of_loans else self.departures
        match event:
            case OpenedEvent(source=Prefix() as prefix):
                self.loans.opened(event, prefix)
            case OpenedEvent():
                self.departures.opened(event)
            case GrantedEvent():
                producer.granted(event)
            case ClosedEvent():
                producer.closed(event)
        return self._turn()

    def _turn(self) -> list[Output]:
        """Yield the outputs that follow in the same turn of the engine."""
        self.departures.poll(0.0)
        held = {page for r in self.beneath.requests.values() for page in r.pages}
        for page in range(len(self.cells)):
            if page not in held and page not in self.beneath.lent:
                require(page not in self._readable(), "pages let go while exposed")
                self.cells[page] = FREE
        posts, self.beneath.posts[:] = list(self.beneath.posts), []
        return [output for command in posts for output in self._posted(command)]

    def begin(self, ticket: int, num_tokens: int) -> None:
        request = Running(ticket, num_tokens, self.plan.tables)
        self.beneath.requests[ticket] = request
        self._fill(request, list(request.places))

    def _launch(self, request: Running) -> None:
        require(request.kv is not Kv.AWAY, "it runs without its pages")
        request.launched = True
        if request.kv is Kv.RETURNING:
            request.kv = Kv.FILLING
        for page, _, _ in request.written:
            self.cells[page] = TORN

    def _return(self, request: Running) -> None:
        """Give it pages again, without content."""
        request.in_batch, request.kv, request.bank = True, Kv.RETURNING, 1 - request.bank
        for page in request.pages:
            self.cells[page] = TORN

    def _filled(self, request: Running) -> None:
        request.kv = Kv.HERE
        self._fill(request, list(request.places))

    def _finish(self, request: Running) -> None:
        written = request.written
        request.launched = False
        request.num_tokens += 1
        if request.kv is Kv.FILLING:
            self._filled(request)
        else:
            self._fill(request, written)
        if request.num_tokens == self.live.most:
            self._end_request(request)

    def _end_request(self, request: Running) -> None:
        self.beneath.leave(request, "ended")
        request.claims.close()

    def _fill(self, request: Running, places: list[tuple[int, int, int]]) -> None:
        state, num_kv = request.tables.num_tables, request.num_tokens - 1
        for page, table, place in places:
            num_there = num_kv if table == state else in_page(place, num_kv)
            self.cells[page] = (request.key, table, place, num_there)


def in_page(place: int, num_kv: int) -> int:
    """Return how many tokens of a page have KV, of this number of tokens."""
    return min(PAGE_SIZE, num_kv - place * PAGE_SIZE)


# The target


class TargetSide(SimulatedConsumer):
    """The migration target. If it copies first, the first attempt of a migration is the copy.

    Attributes:
        joined: tickets of submissions that run here, by migration.
        copied: pages that the tree has.
        prefixes: pages of it that each migration was granted with.
    """

    def __init__(
        self, live: LivePlan, config: TransferConfig, instance: int, *, asks: int = 1
    ) -> None:
        """Args:
        asks: the ticket that its migrations request.
        """
        super().__init__(live.plan(), config, instance)
        self.live = live
        self.asks = asks
        self.joined: tuple[int, ...] = ()
        self.copied: tuple[int, ...] = ()
        self.prefixes = (0,) * live.movers

    def key(self) -> Hashable:
        return super().key(), self.joined, self.copied, self.prefixes

    def faults(self) -> list[Input]:
        return [*super().faults(), *([("evict",)] if self.copied else [])]

    def react(self, given: Input) -> list[Output]:
        match given:
            case ("evict",):
                pages, self.copied = self.copied, ()
                self._release(pages)
                return []
            case ("cancel", r, _):
                id = self._id(self.jobs[r])
                self._leave(r, ENDED)
                return self._posted(CancelHandoff(id, "client"))
        return super().react(given)

    def _command(self, what: str, r: int) -> Any:
        job, known = self.jobs[r], self.live.known - 1
        copies = self._copies(r)
        if what == "open":
            self.jobs[r] = job._replace(state="open")
            if copies:
                known -= known % PAGE_SIZE
            spec = make_spec(range(known), num_generated=known - 1, request_id=str(r))
            source: Source = Live(spec, self.asks)
            if copies:
                source = Prefix(spec.token_ids, ticket=self.asks)
            return OpenCommand(self._id(job), max(self.producers), b"", Remaining(100.0), source)
        command = super()._command(what, r)
        if isinstance(command, GrantCommand) and not copies:
            prefix = len(self.copied)
            self.jobs[r] = self.jobs[r]._replace(pages=self.copied + self.jobs[r].pages)
            self.prefixes = (*self.prefixes[:r], prefix, *self.prefixes[r + 1 :])
            pages, room = command.destination_pages, self.live.room
            return GrantCommand(command.id, prefix * PAGE_SIZE, pages, room)
        return command

    def _copies(self, r: int) -> bool:
        return self.live.copies and self.jobs[r].attempt == 1

    def _restarted(self, instance: int) -> Self:
        """Restart without migrations. A request whose target is gone does not migrate. Its
        router replays it elsewhere."""
        fresh = type(self)(self.live, self.config, instance, asks=self.asks)
        fresh.jobs = [ENDED] * len(self.jobs)
        return fresh

    def _take(self, event: Any) -> None:
        match event:
            case FirstTokenEvent(id, SampledOutput(token, token_ids)):
                r = self._current(id)
                if r is not None:
                    known = self.live.known - 1
                    tokens = (*token_ids, token)
                    require(tokens == tuple(range(known, known + len(tokens))), "wrong tokens")
                    self.jobs[r] = self.jobs[r]._replace(emitted=token + 1)
            case _:
                super()._take(event)

    def _join(self, r: int, id: HandoffId) -> None:
        job, tables = self.jobs[r], self.plan.tables
        if self._copies(r):
            whole = [(self.asks, 0, place, PAGE_SIZE) for place in range(len(job.pages))]
            self._check(job.pages, whole, "copied")
            if not self.copied:  # otherwise another migration has joined before
                self.copied = job.pages
            self._ask_for_the_rest(r)
            return
        require(job.state == "granted" and job.emitted > 0, "joined without its tokens")
        num_kv, prefix = job.emitted - 1, self.prefixes[r]
        whole = [(self.asks, 0, place, PAGE_SIZE) for place in range(prefix)]
        behind = [
            (self.asks, t, place, num_kv if t == tables.num_tables else in_page(place, num_kv))
            for t, first, past in tables.handed_over(num_kv, prefix * PAGE_SIZE)
            for place in range(first, past)
        ]
        self._check(job.pages, whole + behind, "I1: joined")
        self._leave(r, ENDED)
        self._joins(job.emitted)

    def _joins(self, num_tokens: int) -> None:
        self.joined += (self.asks,)

    def _check(self, pages: tuple[int, ...], right: list[Any], what: str) -> None:
        for page, content in zip(pages, right, strict=False):  # the rest is for growth
            require(self.cells[page] == content, f"{what} with {self.cells[page]} in {page}")

    def _ask_for_the_rest(self, r: int) -> None:
        self._leave(r, self.jobs[r]._replace(state="new", attempt=2, pages=()))

    def _retry(self, r: int, lost: FailedEvent) -> None:
        """Retry. A migration computes nothing and has no other source. Pages that were not
        copied are read with the rest."""
        if self._copies(r):
            self._ask_for_the_rest(r)
        else:
            self._leave(r, ENDED)

    def _held(self) -> set[int]:
        return super()._held() | set(self.copied)

    def _num_pages(self, r: int) -> int:
        if self._copies(r):
            return (self.live.known - 1) // PAGE_SIZE
        return self.plan.tables.room_pages(self.live.room, len(self.copied) * PAGE_SIZE)


class LiveSimulation(Simulation):
    def __init__(self, live: LivePlan, config: TransferConfig) -> None:
        target = Node(101, consumer=TargetSide(live, config, 101))
        source = Node(201, producer=SourceSide(live, config, 201))
        super().__init__([target, source], only_faults=live.only_faults)

    def after(self, world: World, step: Step) -> World:
        after = super().after(world, step)
        target, source = (node.consumer or node.producer for node in self.nodes(after))
        assert isinstance(source, SourceSide) and isinstance(target, TargetSide)
        require(len(target.joined) <= 1, "two movers run")
        require(
            not any(source.runs(ticket) for ticket in target.joined), "source and target both run"
        )
        return after
