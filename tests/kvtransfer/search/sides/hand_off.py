"""The two ends of the product with a model engine each, as deterministic automata for a search.

A side consists of the end, the engine's records and the contents of its pages. It reacts to one
input with a list of outputs. The engines check the guarantees of docs/design/hand-off.md: I1, I2,
I4, and that every claim on pages is released exactly once. Contents of pages are tracked cell by
cell.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from common.config import TransferConfig
from common.page_tables import PageTables
from common.request import Remaining
from common.requests.sampling import SamplingParams
from kvtransfer import messages
from kvtransfer.frontend_messages import EndStream, SendMessage
from kvtransfer.messages import CancelHandoff, HandoffAdmitted, HandoffId, SampledOutput
from kvtransfer.ports import (
    AdmittedCommand,
    ClosedEvent,
    CompletedEvent,
    FailCommand,
    FailedEvent,
    FirstTokenEvent,
    GrantCommand,
    GrantedEvent,
    OpenCommand,
    OpenedEvent,
    PagesToRead,
    ProducerDown,
    ProducerUp,
    PublishCommand,
    ReadsEndedEvent,
)
from kvtransfer.protocol.actions import (
    CloseLink,
    ExpectPages,
    ExposePages,
    OpenLink,
    StartRead,
    WithdrawPages,
)
from kvtransfer.protocol.attempt import ProducerPages
from kvtransfer.protocol.consumer import ConsumerEnd
from kvtransfer.protocol.producer import ProducerEnd
from tests.kvtransfer.search.copies import fork, key_of
from tests.support.specs import make_spec

PAGE_SIZE = 4
SAMPLING = SamplingParams(max_tokens=8, seed=1)
FREE = "free"  # a free cell
BANK = 8  # pages of one request in large pools
TORN = "torn"  # a cell that a read is writing or has left incomplete

E = TypeVar("E", ConsumerEnd, ProducerEnd)
Input = tuple[Any, ...]
Output = tuple[Any, ...]


class Broken(AssertionError):
    """An invariant of docs/design/hand-off.md does not hold."""


def require(holds: bool, invariant: str) -> None:
    if not holds:
        raise Broken(invariant)


@dataclass(frozen=True)
class Plan:
    """The parameters of a search."""

    prompts: tuple[int, ...]  # tokens of each request, or pieces of weights
    prefixes: tuple[int, ...]  # of those, tokens cached at the consumer
    consumer_pages: int = 0  # 0: more than enough, and each request has a part of its own
    producer_pages: int = 0
    windows: tuple[int | None, ...] = (None,)  # of the tables of pages
    state_pages: int = 0  # of the consumer
    producer_state_pages: int | None = None  # None: as many
    producers: int = 1  # nodes that compute prompts
    attempts: int = 2
    budget_s: float = 100.0
    admits: bool = False  # whether the producer sends Admitted
    asynchronous: bool = False  # whether the consumer's engine handles its events later
    late_producer: bool = False  # the same for the producer, whose end also handles commands later
    beats: bool = False
    pieces: int | None = None  # of the weights that are read instead of KV
    only_faults: tuple[str, ...] = ()  # empty: all

    @property
    def tables(self) -> PageTables:
        return PageTables(PAGE_SIZE, self.windows, self.state_pages)

    @property
    def of_producer(self) -> "Plan":
        """Return the plan from the producer's view, with its own pages of the state."""
        if self.producer_state_pages is None:
            return self
        return replace(self, state_pages=self.producer_state_pages)

    def source_of(self, page: int) -> int:
        """Return the page of the producer's state that is read into this page of the consumer's."""
        return page % self.of_producer.state_pages

    def places(self, num_tokens: int, prefix: int) -> list[tuple[int, int]]:
        """Return the (table, page) places that are handed over.

        Each table contributes the pages behind the prefix. A table with a window contributes those
        that the next token, or the last page's first token, sees through it. The state follows.
        Weights have a page for each piece instead.
        """
        if self.pieces is not None:
            return [(0, piece) for piece in range(num_tokens)]
        past, edge = -(-num_tokens // PAGE_SIZE), num_tokens // PAGE_SIZE * PAGE_SIZE
        return [
            (table, page)
            for table, window in enumerate(self.windows)
            for page in range(
                -(-prefix // PAGE_SIZE)
                if window is None
                else max(0, edge - window + 1) // PAGE_SIZE,
                past,
            )
        ] + [(self.state, page) for page in range(self.state_pages)]

    @property
    def state(self) -> int:
        """Return the index of the state, which takes the place of a table."""
        return len(self.windows)


# The consumer and a decode node's engine


class Job(NamedTuple):
    """One request in the consumer's engine."""

    state: str  # new | open | granted | ended
    serial: int  # a new id for every submission
    attempt: int
    emitted: int  # tokens that the engine knows and that a new attempt starts with
    delivered: int  # tokens the client has
    pages: tuple[int, ...]  # held for the request


class Side(ABC, Generic[E]):
    """A protocol end that is copied only before an input changes it.

    Its engine may handle the end's events later, and the end the engine's commands.
    """

    def __init__(
        self, plan: Plan, config: TransferConfig, instance: int, end: E, *, late: bool
    ) -> None:
        end.engine_moves(plan.beats)
        self.plan = plan
        self.config = config
        self.instance = instance
        self.inbox: list[Any] = []  # events that the engine has not handled yet
        self.posts: list[Any] = []  # commands that the end has not handled yet
        self._late = late  # whether commands wait
        self._end = end
        self._shared = False
        self._key: Hashable | None = None
        self.now = 0.0

    def fork(self) -> Self:
        """Return a copy that shares the end and has its own lists and dictionaries."""
        self._end_key()
        twin = copy.copy(self)
        twin._shared = True
        for name, value in vars(self).items():
            if type(value) in (list, dict):
                setattr(twin, name, value.copy())
        return twin

    def waiting(self) -> list[Input]:
        """Return the moves that handle events and commands in the queues between the end and its
        engine."""
        return [(what,) for what, waits in (("take", self.inbox), ("post", self.posts)) if waits]

    def key(self) -> Hashable:
        books = (sorted(b.items()) if isinstance(b, dict) else b for b in self._books())
        queues = repr(self.inbox), repr(self.posts)
        return (self._end_key(), self.instance, *map(tuple, books), *queues)

    @abstractmethod
    def _books(self) -> Sequence[Any]:
        """Return what the engine knows."""
        ...

    def react(self, given: Input) -> list[Output]:
        """Change this side and return its outputs to other nodes."""
        match given:
            case ("down", stream):
                actions = self.end.stream_down(stream, "cut")
            case ("message", stream, message):
                actions = self.end.received(stream, message, self.now)
            case ("tick",):
                self.now = max(self.now, self.end.next_deadline() or self.now)
                actions = self.end.tick(self.now)
            case ("post",):
                return self._obeyed(self.posts.pop(0))
            case ("restart", instance):
                self.__dict__.update(self._restarted(instance).__dict__)
                return []
            case _:
                raise AssertionError(given)
        return self._outputs(actions)

    @abstractmethod
    def _restarted(self, instance: int) -> Self:
        """Return this side in a new process."""
        ...

    @abstractmethod
    def _outputs(self, actions: Sequence[Any]) -> list[Output]: ...

    def ticks(self) -> list[Input]:
        """Let the next deadline expire, if there is one."""
        return [("tick",)] if self._end.next_deadline() is not None else []

    def _posted(self, command: Any) -> list[Output]:
        if self._late:
            self.posts.append(command)
            return []
        return self._obeyed(command)

    @abstractmethod
    def _obeyed(self, command: Any) -> list[Output]:
        """Return the outputs of the end for a command of its engine."""
        ...

    @staticmethod
    def _crossing(action: SendMessage | EndStream) -> Output:
        if isinstance(action, SendMessage):
            return ("send", action.stream, action.message)
        return ("end", action.stream, action.reason if action.refused else "")

    @property
    def end(self) -> E:
        """Return the end, copied, to be changed."""
        if self._shared:
            self._end, self._shared = fork(self._end), False
        self._key = None
        return self._end

    def _end_key(self) -> Hashable:
        if self._key is None:
            self._key = key_of(self._end, self.now)
        return self._key


ENDED = Job("ended", 0, 0, 0, 0, ())


def _timeless(event: Any) -> Any:
    """Return an event without times, so that states that behave alike are equal."""
    match event:
        case FirstTokenEvent(id, output):
            return FirstTokenEvent(id, SampledOutput(output.token, output.token_ids))
        case CompletedEvent(id, num_tokens=num_tokens):
            return CompletedEvent(id, num_tokens=num_tokens)
    return event


class SimulatedConsumer(Side[ConsumerEnd]):
    def __init__(self, plan: Plan, config: TransferConfig, instance: int) -> None:
        end = ConsumerEnd(config, plan.tables)
        super().__init__(plan, config, instance, end, late=plan.asynchronous)
        self.jobs = [Job("new", r + 1, 1, 0, 0, ()) for r in range(len(plan.prompts))]
        self.cells: list[Any] = [FREE] * (plan.consumer_pages or len(plan.prompts) * BANK)
        self.reads: dict[HandoffId, tuple[int, ...]] = {}  # pages held for "read"
        self.producers: dict[int, str] = {}  # addresses of those that are up, by instance

    def _books(self) -> Sequence[Any]:
        return self.jobs, self.cells, self.reads, self.producers

    # Possible next moves of the engine alone

    def moves(self) -> list[Input]:
        moves = self.waiting()
        for r, job in enumerate(self.jobs):
            if job.state == "new" and self.producers:
                moves.append(("open", r))
            if job.state == "open" and len(self._free(r)) >= self._num_pages(r):
                moves.append(("grant", r))
        return moves

    def faults(self) -> list[Input]:
        faults: list[Input] = []
        for r, job in enumerate(self.jobs):
            if job.state in ("open", "granted"):
                faults.append(("cancel", r))  # the simulation adds the next serial
                faults.append(("stop", r))
        return faults + self.ticks()

    def live_streams(self) -> set[int]:
        return set(self._end._streams)

    def streams(self) -> set[int]:
        """Return the streams that the end remembers."""
        return self.live_streams() | self._end._links._links.keys()

    def ids(self) -> set[HandoffId]:
        """Return the hand-off ids that any part of this side remembers."""
        under_way = [*self.posts, *self.inbox]
        ids = {self._id(job) for job in self.jobs} | self.reads.keys()
        ids |= {item.id for item in under_way if hasattr(item, "id")}
        return ids | self._end._attempts.keys() | self._end._links._landing.keys()

    def peers(self) -> set[int]:
        """Return the instances that it remembers."""
        return self.producers.keys() | {stream.producer for stream in self._end._streams.values()}

    def at_rest(self) -> bool:
        done = all(job.state == "ended" for job in self.jobs)
        return done and not (self._end.num_open or self._end._links._landing or self.reads)

    # One input

    def react(self, given: Input) -> list[Output]:
        """Change this side and return its outputs to other nodes."""
        match given:
            case ("up", stream, producer, address):
                state_pages = self.plan.of_producer.state_pages
                theirs = ProducerPages(1 << 20, state_pages, same_layout=True, piece_bytes=1)
                actions = self.end.stream_up(stream, producer, address, theirs, self.now)
            case ("link up", stream):
                actions = self.end.link_up(stream, "loopback", 1.0)
            case ("link closed", stream):
                actions = self.end.link_closed(stream, "broken", self.now)
            case ("write", id, pages, contents):
                self._write(id, pages, contents)
                return []
            case ("read ended", stream, refused):
                actions = self.end.read_ended(stream, refused, self.now)
            case ("read late", stream):
                actions = self.end.read_late(stream, self.now)
            case ("take",):
                inbox, self.inbox = self.inbox, []
                for event in inbox:
                    self._take(event)
                return []
            case ("local", r):
                self._leave(r, ENDED)
                return []
            case ("again", r, serial):
                self.jobs[r] = Job("new", serial, 1, 0, 0, ())
                return []
            case ("cancel", r, serial):
                id = self._id(self.jobs[r])
                # The client sends the same request again, as a submission of its own.
                self._leave(r, Job("new", serial, 1, 0, 0, ()))
                return self._posted(CancelHandoff(id, "client"))
            case ("open" | "grant" | "stop" as what, r):
                return self._posted(self._command(what, r))
            case _:
                return super().react(given)
        return self._outputs(actions)

    def _obeyed(self, command: Any) -> list[Output]:
        return self._outputs(self.end.command(command, self.now))

    def _outputs(self, actions: Sequence[Any]) -> list[Output]:
        outputs: list[Output] = []
        for action in actions:
            match action:
                case SendMessage() | EndStream():
                    outputs.append(self._crossing(action))
                case OpenLink():
                    outputs.append(("open link", action.stream))
                case CloseLink():
                    outputs.append(("close link", action.stream))
                case StartRead(stream, id, pages):
                    outputs.append(("read", stream, id, *self._read_pages(pages)))
                case ExpectPages():
                    pass
                case event if self.plan.asynchronous:
                    self.inbox.append(_timeless(event))
                case event:
                    self._take(event)
        return outputs

    def _read_pages(self, read: PagesToRead) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the pages of a read in pairs. Those of the state are last."""
        source, destination = read.source.tolist(), read.destination.tolist()
        num_paired = sum(span.num_pages for span in read.spans)
        state = source[num_paired:]
        num_state = len(destination) - num_paired
        require(bool(state) == bool(num_state), "I1: one side has no state")
        source[num_paired:] = [state[self.plan.source_of(page)] for page in range(num_state)]
        return tuple(source), tuple(destination)

    # Engine: commands

    def _command(self, what: str, r: int) -> Any:
        job = self.jobs[r]
        id = self._id(job)
        match what:
            case "open":
                self.jobs[r] = job._replace(state="open")
                budget = Remaining(self.plan.budget_s)
                return OpenCommand(id, self._producer(r), b"", budget, self._source(r))
            case "grant":
                pages = self._free(r)[: self._num_pages(r)]
                self.reads[id] = pages
                self.jobs[r] = job._replace(state="granted", pages=pages)
                for page in pages:
                    self.cells[page] = "reserved"
                return GrantCommand(
                    id, self._prefix(r, job.emitted), np.array(pages, dtype=np.int32)
                )
            case "stop":
                self._leave(r, ENDED)
                return CancelHandoff(id, "going local, or its first token ended it")
        raise AssertionError(what)

    def _source(self, r: int) -> messages.Source:
        if self.plan.pieces is not None:
            return messages.Weights(r, self.plan.prompts[r], 1)
        num_generated = self.jobs[r].emitted
        tokens = range(self.plan.prompts[r] + num_generated)
        return messages.Prompt(make_spec(tokens, num_generated=num_generated, request_id=str(r)))

    def _producer(self, r: int) -> int:
        """Return the producer of its next attempt: a different one each time, if possible."""
        addresses = sorted(set(self.producers.values()))
        address = addresses[(self.jobs[r].attempt - 1) % len(addresses)]
        return max(instance for instance, at in self.producers.items() if at == address)

    def _restarted(self, instance: int) -> Self:
        fresh = type(self)(self.plan, self.config, instance)
        # The router replays requests that have not ended, with the tokens it knows.
        fresh.jobs = [
            job if job.state == "ended" else Job("new", r + 1, 1, job.delivered, job.delivered, ())
            for r, job in enumerate(self.jobs)
        ]
        return fresh

    # Engine: events

    def _take(self, event: Any) -> None:
        match event:
            case ProducerUp():
                self.producers[event.instance] = event.address
            case ProducerDown():
                self.producers.pop(event.instance, None)
            case HandoffAdmitted():
                pass
            case FirstTokenEvent():
                r = self._current(event.id)
                if r is not None:
                    job = self.jobs[r]
                    require(job.state == "granted", "I4: a token of an attempt without a grant")
                    token = event.output.token
                    require(token == job.delivered, f"I4: token {token} is not the next")
                    self.jobs[r] = job._replace(
                        emitted=job.emitted + 1, delivered=job.delivered + 1
                    )
            case CompletedEvent():
                r = self._current(event.id)
                if r is not None and self.plan.pieces is not None:
                    self._take_pieces(r, event)
                elif r is not None:
                    self._join(r, event.id)
            case FailedEvent():
                r = self._current(event.id)
                if r is not None:
                    self._retry(r, event)
            case ReadsEndedEvent():
                require(event.id in self.reads, "ReadsEndedEvent without a grant, or twice")
                pages = self.reads.pop(event.id)
                self._release(pages)
            case _:
                raise AssertionError(event)

    def _join(self, r: int, id: HandoffId) -> None:
        job = self.jobs[r]
        require(job.state == "granted", "I1: Held without a grant")
        require(job.emitted > 0, "I1: joined before its first token")
        asked = job.emitted - 1  # of them, tokens that the attempt started with
        places = self.plan.places(self.plan.prompts[r] + asked, self._prefix(r, asked))
        for (table, place), page in zip(places, job.pages, strict=True):
            if table == self.plan.state:
                place = self.plan.source_of(place)
            right = (id.instance, id.request, table, place)
            require(self.cells[page] == right, f"I1: joined with {self.cells[page]} in {page}")
        self._leave(r, ENDED)

    def _take_pieces(self, r: int, event: CompletedEvent) -> None:
        job, pieces = self.jobs[r], self.plan.pieces or 0
        expected = min(self.plan.prompts[r], pieces)
        require(event.num_tokens == expected, f"{event.num_tokens} of {expected} pieces arrived")
        for place, page in enumerate(job.pages[:expected]):
            right = (event.id.instance, event.id.request, 0, place)
            require(self.cells[page] == right, f"piece {place} is {self.cells[page]}")
        self._leave(r, ENDED)

    def _retry(self, r: int, lost: FailedEvent) -> None:
        """Retry, or end the job. Without a producer it waits, if its own may return."""
        job = self.jobs[r]
        somewhere = bool(self.producers) or lost.may_return
        if lost.retryable and job.attempt < self.plan.attempts and somewhere:
            self._leave(r, job._replace(state="new", attempt=job.attempt + 1, pages=()))
        else:  # prefilled on the decode node, to its end
            self._leave(r, ENDED)

    def _leave(self, r: int, job: Job) -> None:
        pages, self.jobs[r] = self.jobs[r].pages, job
        self._release(pages)

    def _release(self, pages: Sequence[int]) -> None:
        held = self._held()
        for page in pages:
            if page not in held:
                self.cells[page] = FREE

    def _write(self, id: HandoffId, pages: Sequence[int], contents: Sequence[Any]) -> None:
        held = self.reads.get(id, ())
        for page, content in zip(pages, contents, strict=True):
            require(page in held, f"I2: a read of {id} wrote into page {page}, given away")
            self.cells[page] = content

    def _id(self, job: Job) -> HandoffId:
        return HandoffId(self.instance, job.serial, job.attempt)

    def _current(self, id: HandoffId) -> int | None:
        for r, job in enumerate(self.jobs):
            if self._id(job) == id and job.state in ("open", "granted"):
                return r
        require(self.plan.asynchronous, f"I5: an event about {id}, which is over")
        return None

    def _prefix(self, r: int, emitted: int) -> int:
        whole = self.plan.prefixes[r] == self.plan.prompts[r]
        return self.plan.prefixes[r] + (emitted if whole else 0)

    def _num_pages(self, r: int) -> int:
        num_tokens = self.plan.prompts[r] + self.jobs[r].emitted
        return len(self.plan.places(num_tokens, self._prefix(r, self.jobs[r].emitted)))

    def _free(self, r: int) -> tuple[int, ...]:
        bank = range(r * BANK, (r + 1) * BANK)
        pages = range(self.plan.consumer_pages) if self.plan.consumer_pages else bank
        held = self._held()
        return tuple(page for page in pages if page not in held)

    def _held(self) -> set[int]:
        held = {page for pages in self.reads.values() for page in pages}
        return held | {page for job in self.jobs for page in job.pages}


# The producer and a prefill node's engine


class Prompt(NamedTuple):
    """One request in the producer's engine."""

    id: HandoffId
    num_tokens: int
    num_generated: int
    bank: int
    granted: bool = False
    admitted: bool = False
    done: int = 0  # tokens published, or the consumer's prefix
    pages: tuple[int, ...] = ()  # of Plan.places, from the consumer's prefix `start` on
    start: int = 0
    last_sent: bool = False


class SimulatedProducer(Side[ProducerEnd]):
    def __init__(self, plan: Plan, config: TransferConfig, instance: int) -> None:
        plan = plan.of_producer
        end = ProducerEnd(config, plan.tables)
        super().__init__(plan, config, instance, end, late=plan.late_producer)
        self.prompts: dict[int, Prompt] = {}  # by serial
        self.cells: list[Any] = [FREE] * (plan.producer_pages or len(plan.prompts) * BANK)
        self.exposed: dict[HandoffId, tuple[int, ...]] = {}

    def _books(self) -> Sequence[Any]:
        return self.prompts, self.cells, self.exposed

    def moves(self) -> list[Input]:
        waiting = [s for s, p in self.prompts.items() if p.admitted and not p.last_sent]
        return self.waiting() + [("publish", serial) for serial in waiting]

    def faults(self) -> list[Input]:
        return [("fail", serial) for serial in self.prompts] + self.ticks()

    def streams(self) -> set[int]:
        """Return the streams that the end remembers."""
        return set(self._end._streams)

    def peers(self) -> set[int]:
        """Return the instances that it remembers."""
        return {stream.consumer for stream in self._end._streams.values()}

    def ids(self) -> set[HandoffId]:
        """Return the hand-off ids that any part of this side remembers."""
        waiting = {event.id for event in self.inbox if isinstance(event, OpenedEvent | ClosedEvent)}
        return {p.id for p in self.prompts.values()} | self._end._handoffs.keys() | waiting

    def at_rest(self) -> bool:
        return not self._end.num_open and not self.prompts and not self.exposed

    def contents(self, pages: Sequence[int]) -> tuple[Any, ...]:
        return tuple(self.cells[page] for page in pages)

    def serves(self, pages: Sequence[int]) -> bool:
        return self._readable().issuperset(pages)

    def react(self, given: Input) -> list[Output]:
        """Change this side and return its outputs to other nodes."""
        outputs = self._react(given)
        # A real engine never reuses a serial. Here a serial is reused when no part remembers it,
        # which is equivalent and keeps the number of states finite.
        under_way = {item.serial for item in (*self.inbox, *self.posts)}
        used = self.prompts.keys() | self._end._ids.keys() | under_way
        unused = next(serial for serial in itertools.count(1) if serial not in used)
        if self._end._next_serial != unused:
            self.end._next_serial = unused
        return outputs

    def _react(self, given: Input) -> list[Output]:
        match given:
            case ("up", stream, consumer):
                actions = self.end.stream_up(stream, consumer, self.now)
            case ("publish", serial):
                return self._posted(self._next_chunk(serial))
            case ("fail", serial):
                return self._posted(FailCommand(serial, "let go", retryable=True))
            case ("take",):
                return self._take(self.inbox.pop(0))
            case _:
                return super().react(given)
        return self._outputs(actions)

    def _restarted(self, instance: int) -> Self:
        return type(self)(self.plan, self.config, instance)

    def _obeyed(self, command: Any) -> list[Output]:
        return self._outputs(self.end.command(command))

    def _outputs(self, actions: Sequence[Any]) -> list[Output]:
        outputs: list[Output] = []
        for action in actions:
            match action:
                case SendMessage() | EndStream():
                    outputs.append(self._crossing(action))
                case ExposePages():
                    before = self.exposed.get(action.id, ())
                    self.exposed[action.id] = before + tuple(action.pages.tolist())
                case WithdrawPages():
                    self.exposed.pop(action.id, None)
                case event if self.plan.late_producer:
                    self.inbox.append(event)
                case event:
                    outputs += self._take(event)
        return outputs

    def _take(self, event: Any) -> list[Output]:
        """Handle one event in the engine."""
        match event:
            case OpenedEvent(source=messages.Prompt(spec)):
                require(event.serial not in self.prompts, "opened twice")
                bank = int(spec.request_id)
                self.prompts[event.serial] = Prompt(
                    event.id, spec.num_tokens, spec.num_generated, bank
                )
                return []
            case OpenedEvent(source=messages.Weights(bank, num_pieces)):
                require(event.serial not in self.prompts, "opened twice")
                self.prompts[event.serial] = Prompt(event.id, num_pieces, 0, bank)
                return []
            case GrantedEvent():
                prompt = self.prompts[event.serial]
                prefix = event.prefix_tokens
                self.prompts[event.serial] = prompt._replace(
                    granted=True, done=prefix, start=prefix
                )
                return self._admit()
            case ClosedEvent():
                require(event.serial in self.prompts, "dropped twice, or never opened")
                pages = self.prompts.pop(event.serial).pages
                require(not self._readable() & set(pages), "pages let go while exposed")
                for page in pages:
                    self.cells[page] = FREE
                return self._admit()
        raise AssertionError(event)

    def _readable(self) -> set[int]:
        return {page for pages in self.exposed.values() for page in pages}

    def _admit(self) -> list[Output]:
        outputs: list[Output] = []
        for serial, prompt in list(self.prompts.items()):
            num_pages = len(self.plan.places(prompt.num_tokens, prompt.start))
            free = self._free(prompt)
            if prompt.granted and not prompt.admitted and len(free) >= num_pages:
                pages = tuple(free[:num_pages])
                for page in pages:
                    self.cells[page] = "computing"
                self.prompts[serial] = prompt._replace(admitted=True, pages=pages)
                if self.plan.admits:
                    outputs += self._posted(AdmittedCommand(serial, prompt.num_tokens, 0))
        return outputs

    def _free(self, prompt: Prompt) -> list[int]:
        first = 0 if self.plan.producer_pages else prompt.bank * BANK
        num_pages = self.plan.producer_pages or BANK
        return [page for page in range(first, first + num_pages) if self.cells[page] == FREE]

    def _next_chunk(self, serial: int) -> PublishCommand:
        """Compute and publish one page of the prompt. The last page comes with a token."""
        prompt = self.prompts[serial]
        if self.plan.pieces is not None:
            return self._pieces(serial, prompt, min(prompt.num_tokens, self.plan.pieces))
        end = min(prompt.num_tokens, (prompt.done // PAGE_SIZE + 1) * PAGE_SIZE)
        first = 0 if prompt.done == prompt.start else -(-prompt.done // PAGE_SIZE)
        last = end == prompt.num_tokens
        pages = []
        for (table, place), page in zip(
            self.plan.places(prompt.num_tokens, prompt.start), prompt.pages, strict=True
        ):
            goes = last if table == self.plan.state else first <= place < -(-end // PAGE_SIZE)
            if goes:
                pages.append(page)
                self.cells[page] = (prompt.id.instance, prompt.id.request, table, place)
        self.prompts[serial] = prompt._replace(done=end, last_sent=last)
        output = SampledOutput(prompt.num_generated) if last else None
        ids = np.array(pages, dtype=np.int32)
        return PublishCommand(serial, prompt.done, end, ids, last, output)

    def _pieces(self, serial: int, prompt: Prompt, num_pieces: int) -> PublishCommand:
        """Publish those of the requested pieces that exist."""
        pages = prompt.pages[:num_pieces]
        for place, page in enumerate(pages):
            self.cells[page] = (prompt.id.instance, prompt.id.request, 0, place)
        self.prompts[serial] = prompt._replace(last_sent=True)
        return PublishCommand(serial, 0, num_pieces, np.array(pages, np.int32), last=True)
