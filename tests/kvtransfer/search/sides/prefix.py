"""Prefixes that nodes read from each other's caches, for the search. Protocol ends, exports,
fetches, trees and page accounting are the product's. Prompts that need prefixes and caches that
evict are models.

The model tracks the content of each page: the KV of which tokens, or bytes of another owner.
"""

import copy
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from common.config import PrefixSharingConfig, TransferConfig
from common.page_tables import PageTables, num_pages_of
from common.request import PrefixHint
from common.requests.namespace import Namespace
from engine.batch.holding import NO_PAGE, PageHolding
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from kvtransfer.messages import Prefix
from kvtransfer.ports import (
    ClosedEvent,
    CompletedEvent,
    FailedEvent,
    GrantedEvent,
    OpenedEvent,
    ProducerDown,
    ProducerUp,
    ReadsEndedEvent,
)
from node.sharing.exports import SHARE, PrefixExports
from node.sharing.fetches import PrefixFetches
from node.sharing.reads import SharedReads
from tests.kvtransfer.search.node import Node
from tests.kvtransfer.search.sides.hand_off import (
    ENDED,
    FREE,
    PAGE_SIZE,
    Input,
    Output,
    Plan,
    SimulatedConsumer,
    SimulatedProducer,
    require,
)
from tests.kvtransfer.search.world import Simulation
from tests.support.engine.lifo_pages import LifoFreeList

OTHERS = "others"  # written by any new owner of a page


class PrefixPlan(NamedTuple):
    """The parameters of a search.

    Attributes:
        namespaces: of the prompts that need a prefix. All have the same tokens.
        hinted: pages in the hint to the consumer, at one producer for each prompt in turn.
        further: additional pages in the hint of each next prompt.
        has: pages that each producer has.
        own: pages that the consumer has.
        producers: their addresses.
        windows, state_pages: as in PageTables.
    """

    namespaces: tuple[Namespace, ...] = (b"",)
    hinted: int = 2
    further: int = 0
    has: int = 2
    own: int = 0
    producers: tuple[str, ...] = ("1",)
    consumer_pages: int = 4
    loans: int = 1  # as many as fit at once
    windows: tuple[int | None, ...] = (None,)
    state_pages: int = 0
    asynchronous: bool = False
    only_faults: tuple[str, ...] = ()

    @property
    def tables(self) -> PageTables:
        return PageTables(PAGE_SIZE, self.windows, self.state_pages)

    def hint(self, r: int) -> PrefixHint:
        """Return the prefix hint of a prompt."""
        num_pages = self.hinted + self.further * r
        return PrefixHint(self.producers[r % len(self.producers)], num_pages * PAGE_SIZE)

    def plan(self) -> Plan:
        return Plan(
            (0,) * len(self.namespaces),
            (0,) * len(self.namespaces),
            windows=self.windows,
            state_pages=self.state_pages,
            asynchronous=self.asynchronous,
            late_producer=self.asynchronous,
            only_faults=self.only_faults,
        )


@dataclass(eq=False)
class Memory:
    """A pool, its tree, and the content of each page: prompt, table and place, or the number of
    tokens of a state."""

    num_pages: int
    tables: PageTables
    num_taken: int = 0  # of requests that stay
    pages: PageAllocator = field(init=False)
    cache: PrefixCache = field(init=False)
    cells: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.pages = PageAllocator(self.num_pages, LifoFreeList)
        tables = self.tables
        self.cache = PrefixCache(PAGE_SIZE, self.pages, tables.windows, tables.state_pages)
        self.cells = [FREE] * self.num_pages
        self.pages.allocate(self.num_taken, PageHolder.REQUEST)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Memory":
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        pages = twin.pages  # some of its parts are views of others
        pages._of = tuple(pages._holds)
        pages._cached = pages._of[PageHolder.CACHE]
        return twin

    def learn(self, namespace: Namespace, num_pages: int) -> None:
        """Insert the first pages of a prompt into the tree."""
        tables, end = self.tables, num_pages * PAGE_SIZE
        taken = self.pages.allocate(num_pages_of(tables.handed_over(end, 0)), PageHolder.REQUEST)
        assert taken is not None
        nothing = np.empty((tables.num_full, 0), np.int32)
        holding = PageHolding.laid_out(tables, nothing, taken, end)
        for page, content in _contents(holding, namespace, end):
            self.cells[page] = content
        self.cache.insert(_tokens(end), holding, namespace, state=holding.state)
        self.pages.drop(taken, PageHolder.REQUEST)

    def vandalise(self) -> None:
        """Allocate all available pages, overwrite them, and free them."""
        taken = self.cache.allocate(self.cache.num_available, PageHolder.REQUEST)
        assert taken is not None
        for page in taken.tolist():
            self.cells[page] = OTHERS
        self.pages.drop(taken, PageHolder.REQUEST)

    def check(self, namespaces: tuple[Namespace, ...]) -> None:
        """Check the content of the tree. The content of free pages is irrelevant."""
        self.pages.check()
        self.cache.check()
        for page in self.pages._free.all().tolist():
            self.cells[page] = FREE
        for namespace in dict.fromkeys(namespaces):
            match = self.cache.match(_tokens(8 * PAGE_SIZE), namespace)
            resumable = PageHolding(match.holding.tables, match.state)
            right = _contents(PageHolding(match.shared), namespace, 0)
            right += _contents(resumable, namespace, match.num_tokens)
            for page, content in right:
                require(self.cells[page] == content, f"the tree has {self.cells[page]} in {page}")

    def key(self) -> Hashable:
        tree = tuple(
            (node.key, node.tokens.tobytes(), node.pages.tobytes(), node.state.tobytes())
            for node in self.cache._root.below()
        )
        free = tuple(self.pages._free.all().tolist())
        return tuple(self.cells), tree, free, self.pages._holds.tobytes()


@dataclass(eq=False)
class Posts:
    """A port."""

    waiting: list[Any] = field(default_factory=list)

    def post(self, command: Any) -> None:
        self.waiting.append(command)

    def take(self) -> list[Any]:
        taken, self.waiting = self.waiting, []
        return taken


def _contents(holding: PageHolding, namespace: Namespace, end: int) -> list[tuple[int, Any]]:
    """Return pages with their correct contents. Full tables precede all others."""
    contents = [
        (page, (namespace, table, place))
        for table, row in enumerate(holding.tables.tolist())
        for place, page in enumerate(row)
        if page != NO_PAGE
    ]
    state = holding.state.tolist()
    return contents + [(page, (namespace, "state", i, end)) for i, page in enumerate(state)]


def _tokens(count: int) -> Any:
    return np.arange(count, dtype=np.int32)


# The producer


def exporter_memory(plan: PrefixPlan, free: int | None = None) -> Memory:
    """Return the memory of a node that exports prefixes.

    With `free`, only this number of pages of its pool is not permanently used.
    """
    lent = num_pages_of(plan.tables.handed_over(plan.has * PAGE_SIZE, 0))
    num_pages = SHARE * lent * plan.loans
    return Memory(num_pages, plan.tables, 0 if free is None else num_pages - free)


class ExporterSide(SimulatedProducer):
    def __init__(
        self,
        plan: PrefixPlan,
        config: TransferConfig,
        instance: int,
        memory: Memory,
        *,
        knows: bool = True,
    ) -> None:
        super().__init__(plan.plan(), config, instance)
        self.sharing_plan = plan
        self.memory = memory
        if knows:
            for namespace in dict.fromkeys(plan.namespaces):
                self.memory.learn(namespace, plan.has)
        self.port = Posts()
        self.loans = PrefixExports(
            enabled=True,
            cache=self.memory.cache,
            pages=self.memory.pages,
            tiers=None,
            tables=plan.tables,
            port=self.port,
        )

    def fork(self, copied: dict[int, Any] | None = None) -> Self:
        """Args:
        copied: parts of this node that are copied already.
        """
        twin = super().fork()
        copied = {} if copied is None else copied
        mine = (self.memory, self.port, self.loans)
        twin.memory, twin.port, twin.loans = copy.deepcopy(mine, copied)
        return twin

    def key(self) -> Hashable:
        asked = [(n, each.namespace, len(each.token_ids)) for n, each in self.loans._asked.items()]
        lent = [(serial, pages.tobytes()) for serial, pages in self.loans.pages_in_use.items()]
        books = tuple(sorted(asked)), tuple(sorted(lent))
        return super().key(), self.memory.key(), books

    def moves(self) -> list[Input]:
        return self.waiting()

    def faults(self) -> list[Input]:
        return [("evict",), *self.ticks()]

    def at_rest(self) -> bool:
        lent = self.memory.pages.holds(PageHolder.PUBLICATION).any()
        lent = lent or self.loans._asked or self.loans.pages_in_use
        return not (self._end.num_open or self.exposed or lent)

    def contents(self, pages: Any) -> tuple[Any, ...]:
        return tuple(self.memory.cells[page] for page in pages)

    def react(self, given: Input) -> list[Output]:
        # Serials that exports use are not used again.
        known = [*self.loans._asked, *self.loans.pages_in_use]
        self.prompts = dict.fromkeys(known)  # type: ignore[arg-type]
        outputs = super().react(given)
        self.prompts = {}
        self.check()
        return outputs

    def check(self) -> None:
        self.memory.check(self.sharing_plan.namespaces)
        held = np.flatnonzero(self.memory.pages.holds(PageHolder.PUBLICATION)).tolist()
        require(self._readable() <= set(held), "pages let go while exposed")

    def _react(self, given: Input) -> list[Output]:
        match given:
            case ("evict",):
                self.memory.vandalise()
                return []
        return super()._react(given)

    def _restarted(self, instance: int) -> Self:
        plan = self.sharing_plan
        return type(self)(plan, self.config, instance, exporter_memory(plan), knows=False)

    def _take(self, event: Any) -> list[Output]:
        match event:
            case OpenedEvent(source=Prefix() as prefix):
                self.loans.opened(event, prefix)
            case GrantedEvent():
                self.loans.granted(event)
            case ClosedEvent():
                self.loans.closed(event)
        return [output for command in self.port.take() for output in self._posted(command)]


# The consumer


class FetcherSide(SimulatedConsumer):
    def __init__(
        self, plan: PrefixPlan, config: TransferConfig, instance: int, memory: Memory
    ) -> None:
        super().__init__(plan.plan(), config, instance)
        self.sharing_plan = plan
        self.memory = memory
        if plan.own:
            self.memory.learn(plan.namespaces[0], plan.own)
        self.port = Posts()
        self.shared = SharedReads(instance, self.memory.cache, self.port)
        self.fetches = PrefixFetches(
            PrefixSharingConfig(),
            self.shared,
            page_bytes=1,
            cache=self.memory.cache,
            pages=self.memory.pages,
            tables=plan.tables,
            clock=lambda: 0.0,
        )
        self.cells = self.memory.cells

    def fork(self, copied: dict[int, Any] | None = None) -> Self:
        """Args:
        copied: parts of this node that are copied already.
        """
        twin = super().fork()
        mine = (self.memory, self.port, self.shared, self.fetches)
        twin.memory, twin.port, twin.shared, twin.fetches = copy.deepcopy(mine, copied)
        twin.cells = twin.memory.cells
        return twin

    def key(self) -> Hashable:
        fetches = self.fetches
        under_way = tuple(
            (
                id,
                fetch.option.namespace,
                fetch.option.prefix_tokens,
                fetch.fresh.tobytes(),
                tuple(fetch.waiting),
            )
            for id, fetch in fetches.open.items()
        )
        over = tuple(fetches._over)
        # Other nodes and the wires may still know an id that was used here.
        return super().key(), self.memory.key(), under_way, over, self.shared._next_number[Prefix]

    def moves(self) -> list[Input]:
        jobs = enumerate(self.jobs)
        begins = [("begin", r) for r, job in jobs if job.state == "new" and self.producers]
        return self.waiting() + begins

    def faults(self) -> list[Input]:
        forgets = [("forget", r) for r, job in enumerate(self.jobs) if job.state == "open"]
        return [("evict",), *forgets, *self.ticks()]

    def at_rest(self) -> bool:
        held = sum(
            int(self.memory.pages.holds(h).sum()) for h in (PageHolder.READ, PageHolder.REQUEST)
        )
        return held == self.memory.num_taken and super().at_rest() and not self.fetches.busy

    def react(self, given: Input) -> list[Output]:
        match given:
            case ("begin", r):
                outputs = self._begin(r)
            case ("forget", r):
                self.fetches.forget(r)
                self.jobs[r] = ENDED
                outputs = []
            case ("evict",):
                self.memory.vandalise()
                outputs = []
            case _:
                outputs = super().react(given)
        for r in self.fetches.take_over():
            self.jobs[r] = ENDED  # computed here, behind the tree's prefix
        self.reads = {id: tuple(pages.tolist()) for id, pages in self.fetches.pages_in_use.items()}
        self.memory.check(self.sharing_plan.namespaces)
        return outputs

    def _begin(self, r: int) -> list[Output]:
        plan = self.sharing_plan
        hint = plan.hint(r)
        begun = self.fetches.start(
            r,
            _tokens(hint.num_tokens + 1),
            plan.namespaces[r],
            [hint],
            room=self.memory.cache.num_available,
            token_s=1e6,
            queued_s=0.0,
        )
        self.jobs[r] = self.jobs[r]._replace(state="open") if begun else ENDED
        return [output for command in self.port.take() for output in self._posted(command)]

    def _restarted(self, instance: int) -> Self:
        plan = self.sharing_plan
        memory = Memory(plan.consumer_pages, plan.tables)
        fresh = type(self)(plan, self.config, instance, memory)
        fresh.jobs = [ENDED] * len(self.jobs)
        return fresh

    def _take(self, event: Any) -> None:
        match event:
            case ProducerUp():
                self.producers[event.instance] = event.address
                self.shared.note(event)
            case ProducerDown():
                self.producers.pop(event.instance, None)
                self.fetches.costs.forget(event.instance)
                self.shared.note(event)
            case CompletedEvent():
                self.fetches.held(event)
            case FailedEvent():
                self.fetches.lost(event)
            case ReadsEndedEvent():
                self.fetches.reads_ended(event)
            case _:
                raise AssertionError(event)


class PrefixSimulation(Simulation):
    def __init__(self, plan: PrefixPlan, config: TransferConfig) -> None:
        memory = Memory(plan.consumer_pages, plan.tables)
        nodes = [Node(101, consumer=FetcherSide(plan, config, 101, memory))]
        for address in plan.producers:
            instance = 100 * int(address) + 101
            lender = ExporterSide(plan, config, instance, exporter_memory(plan))
            nodes.append(Node(instance, producer=lender))
        super().__init__(nodes, [(0, int(each)) for each in plan.producers], plan.only_faults)


class Peer(Node):
    """Both ends over one memory, with a prefix of one namespace. The node needs that of another
    one.

    Args:
        free: pages that are not permanently used, some of which it exports.
    """

    consumer: FetcherSide
    producer: ExporterSide

    def __init__(
        self,
        wants: PrefixPlan,
        has: PrefixPlan,
        config: TransferConfig,
        instance: int,
        *,
        free: int,
        knows: bool = True,
    ) -> None:
        memory = exporter_memory(has, free)
        consumer = FetcherSide(wants, config, instance, memory)
        producer = ExporterSide(has, config, instance, memory, knows=knows)
        super().__init__(instance, consumer=consumer, producer=producer)
        self._plans, self._config, self._free = (wants, has), config, free

    def fork(self, *names: str) -> None:
        copied: dict[int, Any] = {}
        self.consumer, self.producer = self.consumer.fork(copied), self.producer.fork(copied)

    def react(self, name: str, given: Input) -> list[Output]:
        outputs = super().react(name, given)
        self.producer.check()
        return outputs

    def restart(self) -> None:
        wants, has = self._plans
        fresh = Peer(wants, has, self._config, self.instance, free=self._free, knows=False)
        fresh.consumer.jobs = [ENDED] * len(fresh.consumer.jobs)
        self.consumer, self.producer = fresh.consumer, fresh.producer


class PeersSimulation(Simulation):
    """Two nodes. Each needs the prefix that the other has."""

    def __init__(self, plan: PrefixPlan, config: TransferConfig, *, free: int) -> None:
        whose = b"one's prompts...", b"other's prompts."
        nodes = []
        for n in (0, 1):
            has = plan._replace(namespaces=(whose[n],))
            wants = plan._replace(namespaces=(whose[1 - n],), producers=(str(1 - n),))
            nodes.append(Peer(wants, has, config, 100 * n + 101, free=free))
        super().__init__(nodes, [(0, 1), (1, 0)], plan.only_faults)
