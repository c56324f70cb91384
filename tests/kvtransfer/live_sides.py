"""A running request that goes from one decode node to another, as a pair for the search: the
product's own ends, its books of departures, and a model of what is beneath and beside them.

The source runs one request, a step at a time, and may have it submitted anew under another ticket
(its router has lost the stream, and replays). The target has movers of the first submission: more
than one where the router has moved it twice. KV is tracked page by page, with how many tokens of
it are there, and whose submission's they are.
"""

import copy
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from common.config import TransferConfig
from common.engine.memory.pages import Holder
from common.engine.rows.holding import Holding
from common.engine.schedule.stopped import Stopped
from common.page_tables import PageTables
from common.requests.adapter import NO_ADAPTER, AdapterId
from common.requests.namespace import SHARED, Namespace
from common.requests.sampling import SamplingParams
from decode_node.departures import Departures
from kvtransfer.messages import HandoffId, Kind
from kvtransfer.ports import (
    CancelHandoff,
    FirstToken,
    Granted,
    GrantHandoff,
    HandoffDropped,
    Lost,
    Opened,
    OpenHandoff,
)
from tests.kvtransfer.sides import (
    BANK,
    FREE,
    PAGE_SIZE,
    SAMPLING,
    TORN,
    Input,
    Job,
    Output,
    OwnerSide,
    Plan,
    ReaderSide,
    require,
)
from tests.kvtransfer.world import Simulation, Step, World

ENDED = Job("ended", 0, 0, 0, 0, ())
FOR_EVER = 1e9


class LivePlan(NamedTuple):
    """What is searched.

    known: tokens that the router has when it submits the mover.
    most: tokens at which the request ends.
    room: tokens whose KV the target has room for.
    """

    known: int = 4
    most: int = 7
    room: int = 8
    movers: int = 1
    asynchronous: bool = False  # whether the engines take events, and ends commands, later
    only_faults: tuple[str, ...] = ()

    def plan(self) -> Plan:
        return Plan(
            (self.most,) * self.movers,
            (0,) * self.movers,
            asynchronous=self.asynchronous,
            late_owner=self.asynchronous,
            only_faults=self.only_faults,
        )


# The source --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Running:
    """One submission of the request; its tokens are 0, 1, 2, ..."""

    key: int  # its ticket too
    num_tokens: int
    in_batch: bool = True
    launched: bool = False
    slot: int | None = 0
    told: str = ""  # "ended" | "moved"
    request_id: str = "r"
    sampling: SamplingParams = SAMPLING
    adapter: AdapterId = NO_ADAPTER
    namespace: Namespace = SHARED

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // PAGE_SIZE)

    @property
    def pages(self) -> tuple[int, ...]:
        first = (self.key - 1) * BANK
        return tuple(range(first, first + self.num_pages))


@dataclass(eq=False)
class Beneath:
    """What Departures asks and tells: scheduler, page books, live requests, port."""

    requests: dict[int, Running] = field(default_factory=dict)  # by ticket
    lent: list[int] = field(default_factory=list)
    posts: list[Any] = field(default_factory=list)

    # scheduler
    def tokens_of(self, request: Running) -> Any:
        return np.arange(request.num_tokens, dtype=np.int32) if request.in_batch else None

    def stop(self, request: Running) -> bool:
        in_batch, request.in_batch = request.in_batch, False
        return in_batch

    def stopped(self, request: Running) -> Stopped | None:
        if request.launched:
            return None
        pages = Holding(np.array([request.pages], np.int32))
        return Stopped(np.arange(request.num_tokens, dtype=np.int32), pages)

    def go_on(self, request: Running) -> None:
        request.in_batch = True

    # pages
    def hold(self, pages: Any, holder: Holder) -> None:
        self.lent += pages.tolist()

    def drop(self, pages: Any, holder: Holder) -> None:
        for page in pages.tolist():
            self.lent.remove(page)

    # live requests, counts, port
    def by_ticket(self, ticket: int) -> Running | None:
        return self.requests.get(ticket)

    def moved_away(self, *, held: bool) -> None:
        pass

    def post(self, command: Any) -> None:
        self.posts.append(command)

    def on_moved(self, request: Running) -> None:
        self.leave(request, "moved")

    def leave(self, request: Running, told: str) -> None:
        del self.requests[request.key]
        request.in_batch, request.slot, request.told = False, None, told


class SourceSide(OwnerSide):
    def __init__(
        self, live: LivePlan, config: TransferConfig, instance: int, *, runs: bool = True
    ) -> None:
        super().__init__(live.plan(), config, instance)
        self.live = live
        self.beneath = Beneath()
        self.cells = [FREE] * (2 * BANK)
        self.departures = Departures(
            scheduler=self.beneath,  # type: ignore[arg-type]
            pages=self.beneath,  # type: ignore[arg-type]
            tables=PageTables(PAGE_SIZE),
            page_bytes=1,
            port=self.beneath,
            live=self.beneath,  # type: ignore[arg-type]
            counts=self.beneath,  # type: ignore[arg-type]
            on_moved=self.beneath.on_moved,  # type: ignore[arg-type]
        )
        if runs:
            self._begin(1)

    def fork(self) -> "SourceSide":
        twin = super().fork()
        assert isinstance(twin, SourceSide)
        log = self.departures._log  # has a lock
        twin.departures, twin.beneath = copy.deepcopy(
            (self.departures, self.beneath), {id(log): log}
        )
        return twin

    def key(self) -> Hashable:
        books = [
            (serial, d.request.key, d.num_known, d.state, d.over, d.room_tokens, d.lent.tobytes())
            for serial, d in self.departures._by_serial.items()
        ]
        requests = [
            (r.key, r.num_tokens, r.in_batch, r.launched) for r in self.beneath.requests.values()
        ]
        refused = tuple(sorted(self.departures._refused))
        return (super().key(), tuple(books), tuple(requests), refused, tuple(self.beneath.lent))

    @property
    def request(self) -> Running | None:
        """The newest submission, if it has not ended."""
        return next(reversed(self.beneath.requests.values()), None)

    def runs(self, ticket: int) -> bool:
        request = self.beneath.requests.get(ticket)
        return request is not None and (request.in_batch or request.launched)

    def moves(self) -> list[Input]:
        moves: list[Input] = [("take",)] if self.inbox else []
        moves += [("post",)] if self.posts else []
        for ticket, request in self.beneath.requests.items():
            if request.launched:
                moves.append(("finish", ticket))
            elif request.in_batch:
                moves.append(("launch", ticket))
        return moves

    def faults(self) -> list[Input]:
        faults: list[Input] = [("end", ticket) for ticket in self.beneath.requests]
        if 1 in self.beneath.requests:
            faults.append(("replay",))
        if any(d.paused_until < FOR_EVER for d in self.departures._by_serial.values()):
            faults.append(("pause is over",))
        if self._end.next_deadline() is not None:
            faults.append(("tick",))
        return faults

    def ids(self) -> set[HandoffId]:
        waiting = {event.id for event in self.inbox if isinstance(event, Opened | HandoffDropped)}
        return self._end._handoffs.keys() | waiting

    def at_rest(self) -> bool:
        held = self.beneath.lent or self.beneath.requests or len(self.departures)
        return not (self._end.num_open or self.exposed or held or self.departures._refused)

    def react(self, given: Input) -> list[Output]:
        # Serials of departures and of what was refused are remembered by the engine alone.
        known = self.departures._by_serial.keys() | self.departures._refused
        self.prompts = dict.fromkeys(known)  # type: ignore[arg-type]
        outputs = super().react(given)
        self.prompts = {}
        return outputs

    def _react(self, given: Input) -> list[Output]:
        match given:
            case ("launch", ticket):
                request = self.beneath.requests[ticket]
                request.launched = True
                self.cells[self._tail(request)] = TORN
            case ("finish", ticket):
                self._finish(self.beneath.requests[ticket])
            case ("end", ticket):
                self._end_request(self.beneath.requests[ticket])
            case ("replay",):
                self._end_request(self.beneath.requests[1])
                self._begin(2)
            case ("pause is over",):
                self.departures.poll(FOR_EVER)
            case ("restart", instance):
                fresh = SourceSide(self.live, self.config, instance, runs=False)
                self.__dict__.update(fresh.__dict__)
                return []
            case _:
                return super()._react(given)
        return self._turn()

    def _take(self, event: Any) -> list[Output]:
        match event:
            case Opened():
                self.departures.opened(event)
            case Granted():
                self.departures.granted(event)
            case HandoffDropped():
                self.departures.dropped(event)
        return self._turn()

    def _turn(self) -> list[Output]:
        """What comes of it in the same turn of the engine."""
        self.departures.poll(0.0)
        held = {page for r in self.beneath.requests.values() for page in r.pages}
        for page in range(len(self.cells)):
            if page not in held and page not in self.beneath.lent:
                require(page not in self._readable(), "pages let go while exposed")
                self.cells[page] = FREE
        posts, self.beneath.posts[:] = list(self.beneath.posts), []
        return [output for command in posts for output in self._posted(command)]

    def _begin(self, ticket: int) -> None:
        self.beneath.requests[ticket] = request = Running(ticket, self.live.known)
        for place, page in enumerate(request.pages):
            self.cells[page] = self._content(request, place)

    def _finish(self, request: Running) -> None:
        tail = self._tail(request)
        request.launched = False
        request.num_tokens += 1
        self.cells[tail] = self._content(request, tail - request.pages[0])
        if request.num_tokens == self.live.most:
            self._end_request(request)

    def _end_request(self, request: Running) -> None:
        self.beneath.leave(request, "ended")
        self.departures.ended(request)  # type: ignore[arg-type]

    def _tail(self, request: Running) -> int:
        """The page that gets the KV of its newest token."""
        return request.pages[0] + (request.num_tokens - 1) // PAGE_SIZE

    def _content(self, request: Running, place: int) -> tuple[int, int, int]:
        return content(request.key, place, request.num_tokens - 1)


def content(ticket: int, place: int, num_kv: int) -> tuple[int, int, int]:
    """What a page has when so many tokens of a submission have KV."""
    return ticket, place, min(PAGE_SIZE, num_kv - place * PAGE_SIZE)


# The target --------------------------------------------------------------------------------------


class TargetSide(ReaderSide):
    """joined: tickets of submissions that run here, by mover."""

    def __init__(self, live: LivePlan, config: TransferConfig, instance: int) -> None:
        super().__init__(live.plan(), config, instance)
        self.live = live
        self.joined: tuple[int, ...] = ()

    def key(self) -> Hashable:
        return super().key(), self.joined

    def react(self, given: Input) -> list[Output]:
        match given:
            case ("cancel", r, _):
                id = self._id(self.jobs[r])
                self._leave(r, ENDED)
                return self._posted(CancelHandoff(id, "client"))
        return super().react(given)

    def _command(self, what: str, r: int) -> Any:
        job, known = self.jobs[r], self.live.known - 1
        if what == "open":
            self.jobs[r] = job._replace(state="open")
            tokens = np.arange(known, dtype=np.int32)
            return OpenHandoff(
                self._id(job),
                max(self.owners),
                tokens,
                known - 1,
                SAMPLING,
                100.0,
                str(r),
                kind=Kind.LIVE,
                ticket=1,
            )
        command = super()._command(what, r)
        if isinstance(command, GrantHandoff):
            room = self.live.room
            return GrantHandoff(command.id, 0, command.destination_pages, room)
        return command

    def _restart(self, instance: int) -> None:
        """Nobody moves a request whose target is gone; its router replays it elsewhere."""
        fresh = TargetSide(self.live, self.config, instance)
        fresh.jobs = [ENDED] * len(self.jobs)
        self.__dict__.update(fresh.__dict__)

    def _take(self, event: Any) -> None:
        match event:
            case FirstToken(id, token, token_ids=token_ids):
                r = self._current(id)
                if r is not None:
                    known = self.live.known - 1
                    tokens = (*token_ids, token)
                    require(tokens == tuple(range(known, known + len(tokens))), "wrong tokens")
                    self.jobs[r] = self.jobs[r]._replace(emitted=token + 1)
            case _:
                super()._take(event)

    def _join(self, r: int, id: HandoffId) -> None:
        job = self.jobs[r]
        require(job.state == "granted" and job.emitted > 0, "joined without its tokens")
        num_kv = job.emitted - 1
        for place in range(-(-num_kv // PAGE_SIZE)):
            cell, page = self.cells[job.pages[place]], job.pages[place]
            require(cell == content(1, place, num_kv), f"I1: joined with {cell} in {page}")
        self._leave(r, ENDED)
        self.joined += (1,)

    def _retry(self, r: int, lost: Lost) -> None:
        """A mover computes nothing by itself, and tries nothing else."""
        self._leave(r, ENDED)

    def _num_pages(self, r: int) -> int:
        return self.plan.tables.room_pages(self.live.room, 0)


class LiveSimulation(Simulation):
    def __init__(self, live: LivePlan, config: TransferConfig) -> None:
        super().__init__(live.plan(), config)
        self.readers = type(self.readers)(TargetSide(live, config, instance=101))
        self.owners = type(self.owners)(SourceSide(live, config, instance=11))

    def after(self, world: World, step: Step) -> World:
        after = super().after(world, step)
        source, target = self.owners.sides[after.owner], self.readers.sides[after.reader]
        assert isinstance(source, SourceSide) and isinstance(target, TargetSide)
        require(len(target.joined) <= 1, "two movers run")
        require(
            not any(source.runs(ticket) for ticket in target.joined), "source and target both run"
        )
        return after
