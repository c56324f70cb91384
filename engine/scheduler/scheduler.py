"""The scheduler: decides which requests each step computes, and applies the results of steps.
next_rows.py decides which rows the next step has.

    add -> waiting --admitted--> chunks --last chunk launched--> running --> ended
    join (KV is there already) ------------------------------>     |  ^
                                                        retracted <+--+

It knows no nodes, transfers or sockets, and never blocks. A launched step holds its slots until
`finish`. A request may end while a forward still writes its pages. The step then holds them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from common.config import SchedulerConfig
from common.distribution import HistogramCounts
from common.errors import EngineFault, FailedPrecondition, InvalidRequest
from common.queueing import PriorityClass
from engine.batch.batch import BatchResult, Ints, ScheduleBatch
from engine.batch.holding import ONE, PageHolding
from engine.batch.request import Request, RequestEnd, out_of_time, waited_too_long
from engine.core import EngineCore
from engine.kv_cache.pages import PageHolder, Pages
from engine.scheduler.admission import PrefillAdmission
from engine.scheduler.arrivals import FreeCapacity, KeptCapacity, PageDemand
from engine.scheduler.assembly import DecodeRows, LaunchedSteps, Speculation, StepAssembler
from engine.scheduler.next_rows import NO_ROWS, Preemption, RowSelector, SelectedRows, StepKind
from engine.scheduler.results import ChunkDone, FinishedRequest, StepOutcome, StepResults
from engine.scheduler.retraction import NO_SWAPS, RetractedRequests, Retraction
from engine.scheduler.running import NewTokenRatio, QuarantineQueue, RunningBatch
from engine.scheduler.slot_owners import MaskWaits, PausedRequest, SlotOwners, check_books
from engine.scheduler.split_prefill import GroupLimits, SplitSelector

__all__ = ["ChunkDone", "FinishedRequest", "Scheduler", "StepOutcome"]

DEADLINE_CHECK_S = 0.1
_NOTHING: Mapping[PageHolder, Iterable[Pages]] = {}


class Scheduler:
    """The scheduler of a node's engine. Engine thread only.

    Attributes:
        kept: capacity that requests from `add` must leave to requests that will `join`.
        rows: chooses the rows of each forward.
        preempts: whether a waiting request may preempt a running one.
        paused: no step is chosen while it is set. Launched steps finish.
        running_alone: the quarantined request (common/request.py) whose step is launched, if any.
            Nothing else is on the device then.
    Args:
        core: its host pages also store retracted requests.
        on_admit: called with a request and the pages of its whole prompt when they are reserved and
            its cached prefix is held. Called again if the request was retracted and must be
            recomputed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        core: EngineCore,
        on_admit: Callable[[Request, PageHolding], None],
    ) -> None:
        self._core = core
        self._table = core.table
        self._pages = core.pages
        self._cache = core.cache
        ratio = NewTokenRatio(
            config.new_token_ratio,
            config.min_new_token_ratio,
            config.new_token_ratio_steps,
            config.schedule_conservativeness,
        )
        self._running = RunningBatch(core.table, core.cache, ratio)
        self._launched = LaunchedSteps(core.table, core.pages)
        self._retracted = RetractedRequests(core, self._launched.hold_written)
        self.kept = KeptCapacity()
        self._admission = PrefillAdmission(
            config, core, self._retracted, ratio, self.kept, on_admit
        )
        self._speculation: Speculation | None = None
        if core.speculator is not None:
            self._speculation = Speculation(core.speculator, core, self._running)
        self._retraction = Retraction(core, self._running, self._retracted, config.retract_every)
        self._quarantine = QuarantineQueue(core.table)
        self._preemption = Preemption(
            config, core, self._running, self._retracted, self._quarantine
        )
        self._owners = SlotOwners(
            core,
            self._admission,
            self._running,
            self._retracted,
            self._quarantine,
            self._launched,
        )
        self._mask_waits = MaskWaits(core.table, self._owners, self._running, self._retracted)
        self._results = StepResults(core, self._admission, self._retracted, self._owners)
        self.rows = RowSelector(
            self.kept,
            mixed_chunk=config.mixed_chunk and not config.split_prefill_ms,
            admission=self._admission,
            running=self._running,
            quarantine=self._quarantine,
            owners=self._owners,
            retraction=self._retraction,
            preemption=self._preemption,
        )
        self.preempts = config.preemption_threshold > 0
        self.running_alone: Request | None = None
        self.paused = False
        self._assembler = StepAssembler(core.table)
        self._split: SplitSelector | None = None
        self._expiry_due = 0.0
        self._num_withdrawn = 0  # ended before they had a slot
        self._num_late = 0

    # Start and end of requests.

    def add(self, request: Request) -> None:
        """Queue a request for prefill. The caller limits the number of waiting requests.

        Raises:
            InvalidRequest: the page pool is too small for its tokens.
        """
        if len(request.token_ids) >= self._admission.max_length(request):
            raise InvalidRequest(
                f"token_ids: {len(request.token_ids)} tokens leave no room for another one"
            )
        self._admission.waiting.append(request)

    def join(self, request: Request, holding: PageHolding) -> bool:
        """Put a request whose KV exists into the running batch, without a prefill.

        Args:
            holding: pages with the KV of all its tokens except the last. On success, its REQUEST
                holds pass to the scheduler, and its full pages are inserted into the prefix cache.
        Returns:
            False if no slot is free. Then nothing has changed.
        Raises:
            EngineFault: its last token already ended it (`finish_of`), or it has too few pages.
        """
        num_tokens = len(request.token_ids)
        if num_tokens - 1 > holding.num_pages * self._table.page_size:
            raise EngineFault(f"KV of {num_tokens - 1} tokens is not in {holding.num_pages} pages")
        if num_tokens >= self._admission.max_length(request):
            raise EngineFault(f"request {request.key} has all its {num_tokens} tokens already")
        slot = self._admission.take_slot(request, holding)
        if slot is None:
            return False
        self._owners.record(slot, request)
        self._cache.insert(request.token_ids[:-1], holding, request.namespace)
        self._owners.run(slot, request)
        return True

    def abort(self, request: Request, finish: RequestEnd) -> FinishedRequest | None:
        """End a request early, for the reason in `finish`.

        Returns:
            The ended request if it ends at once. None if the request is not here, or if a launched
                step has it. In the second case it ends with the result of that step.
        """
        slot = request.slot
        if slot is None:
            if request not in self._admission.waiting:
                return None
            self._admission.waiting.remove(request)
            if request.encoding is not None:
                request.encoding.cancelled = True
            self._num_withdrawn += 1
            return FinishedRequest(request, finish)
        if request in self._retracted or not self._table.in_flight(slot):
            self._owners.end(request)
            return FinishedRequest(request, finish)
        if request.to_finish is None:
            request.to_finish = finish
            # No further row is scheduled, and the next result is its last.
            self._table.max_length[slot] = 0
        return None

    def expire(self, now: float | None = None, queued_s: float = 0.0) -> list[FinishedRequest]:
        """Abort requests past their deadline, and waiting requests past their queue limit.

        Both are checked only every DEADLINE_CHECK_S. It also aborts requests that exceeded the time
        budget of their grammar, and releases rows whose mask is ready. Call it every
        DEADLINE_CHECK_S, and in each poll while `awaits_masks`.

        Args:
            queued_s: retry delay in seconds that requests past their queue limit report.
        Returns:
            The requests that end at once.
        """
        now = self._core.clock() if now is None else now
        ended = []
        if self._mask_waits.any:
            ended = [self.abort(request, finish) for request, finish in self._mask_waits.settle()]
        if now < self._expiry_due:
            return [finished for finished in ended if finished is not None]
        self._expiry_due = now + DEADLINE_CHECK_S
        late = [request for request in self._admission.waiting if request.deadline < now]
        (slots,) = (self._table.live & (self._table.deadline < now)).nonzero()
        late += [self._owners.by_slot[slot] for slot in slots.tolist()]
        late = [request for request in late if request.to_finish is None]
        self._num_late += len(late)
        finish = out_of_time()
        ended += [self.abort(request, finish) for request in late]
        waiting = [each for each in self._admission.waiting if each.start_by < now]
        if not self._owners and not self.paused:
            # Requests that wait for the encoder are checked next.
            waiting = [each for each in waiting if each.is_encoding]
        ended += [self.abort(request, waited_too_long(queued_s)) for request in waiting]
        return [finished for finished in ended if finished is not None]

    def finish_of(self, request: Request, token: int) -> RequestEnd | None:
        """Return how `token`, which follows request.token_ids, ends the request. None: it
        continues."""
        at_limit = len(request.token_ids) + 1 >= self._admission.max_length(request)
        return self._results.rule.decide(request, token, at_limit)

    # Live migration of running requests.

    def tokens_of(self, request: Request) -> Ints | None:
        """Return all known tokens of a running request, or None if it does not run or is ending."""
        slot = request.slot
        if slot is None or request.to_finish is not None or request is self.running_alone:
            return None
        runs = slot in self._running and request not in self._retracted
        return self._table.tokens_of(slot) if runs else None

    def publish_prefix(self, request: Request) -> bool:
        """Insert the whole pages of a running request into the prefix cache, as far as their KV is
        known to be written.

        Returns:
            False if the request does not run, or if a launched step still writes these pages: it
                computes some of their tokens, or fills them after a retraction.
        """
        tokens = self.tokens_of(request)
        if tokens is None:
            return False
        assert request.slot is not None
        holding = self._table.holding_of(request.slot)
        num_pages = (len(tokens) - 1) // self._table.page_size
        whole = PageHolding(holding.tables[:, :num_pages]).flat()
        held_by_step = self._pages.holds(PageHolder.STEP)[whole].any()
        if held_by_step or self._launched.compute(request.slot, num_pages * self._table.page_size):
            return False
        self._cache.insert(tokens[:-1], holding, request.namespace)
        return True

    def pause(self, request: Request) -> bool:
        """Take a running request out of the batch. It keeps its slot and pages, and is neither
        retracted nor grown until `resume`.

        Returns:
            False if it does not run or is ending. Then nothing has changed.
        """
        if self.tokens_of(request) is None:
            return False
        assert request.slot is not None
        self._running.leave(request.slot)
        return True

    def take_paused(self, request: Request) -> PausedRequest | None:
        """Return the tokens and pages of a paused request, or None while a launched step computes
        it or may write one of its pages."""
        slot = request.slot
        assert slot is not None
        holding = self._table.holding_of(slot)
        if self._table.in_flight(slot) or self._pages.holds(PageHolder.STEP)[holding.flat()].any():
            return None
        return PausedRequest(self._table.tokens_of(slot), holding)

    def resume(self, request: Request) -> None:
        """Put a paused request back into the batch."""
        assert request.slot is not None
        self._running.join(request.slot)

    def remove_migrated(self, request: Request) -> None:
        """End a paused request that now runs on another node. Its KV stays in the prefix cache."""
        self._owners.end(request, insert=True)

    # Paused scheduler.

    @property
    def at_rest(self) -> bool:
        """Return whether the scheduler is paused and no launched step is unfinished."""
        return self.paused and not self.computes

    @property
    def computes(self) -> bool:
        """Return whether a launched step is unfinished."""
        return len(self._launched) > 0 or self._launched.split is not None

    def requeue_all(self) -> None:
        """Release all KV of the requests, and queue them to be recomputed from their tokens.

        Call it only while the scheduler is `at_rest` and no request is paused.
        """
        requests = self._owners.by_slot.values()
        for request in sorted(requests, key=lambda each: each.queue_position):
            self._owners.requeue(request)

    def clear_cache(self) -> None:
        """Empty the prefix cache. Call it only while the scheduler is `at_rest`, after
        `requeue_all`."""
        self._cache.flush()

    # Capacity, for the admission of joining requests.

    def free_capacity(self) -> FreeCapacity:
        """Return the capacity for joining requests of at least the priority `min_priority`.

        Pages: free and evictable ones, minus the expected growth of running requests and the kept
        pages. Slots: free ones, minus the kept slots.
        """
        reserved_pages = self.rows.reserved_pages + self._admission.growth_of_chunked
        if (split := self._launched.split) is not None:
            growing = (row.request for row in split.extends if row.samples)
            reserved_pages += sum(map(self._admission.growth_pages, growing))
        num_pages = self._cache.num_available - reserved_pages
        return FreeCapacity(num_pages, self._admission.num_free_slots)

    @property
    def min_priority(self) -> float:
        """Minimum priority that admission accepts now."""
        return self._preemption.min_priority

    def preempt_for(self, priority: int, num_pages: int) -> None:
        """Preempt less urgent requests, if that gives a request of this priority a slot and its
        pages.

        They are free a few steps later. Until then, further calls do nothing.
        """
        if self.running_alone is not None or not self._preemption.may_help(priority):
            return
        if self._preempts_now:
            return
        room = self.free_capacity()
        if not room.fits(num_pages):
            self._preemption.preempt_for(priority, num_pages, room, self._owners.by_slot)

    @property
    def _preempts_now(self) -> bool:
        """Return whether pages of preempted requests are still being saved, so that they are not
        free yet."""
        swapping = any(step.batch.swap_out is not None for step in self._launched)
        return swapping or self._retracted.saving

    @property
    def first_demand(self) -> PageDemand | None:
        """The pages and the slot that the first request in the waiting queue needs."""
        return self._admission.first_demand

    def growth_pages(self, request: Request) -> int:
        """Return the pages to keep free for the growth of a request that will join with all its
        pages."""
        return self._admission.growth_pages(request)

    def allocate(self, num_pages: int, holder: PageHolder) -> Ints | None:
        """Allocate pages for a caller outside the scheduler, evicting if needed. All or nothing."""
        return self._cache.allocate(num_pages, holder)

    def flush_cache(self) -> int:
        """Empty the prefix cache. Return the number of freed pages.

        Raises:
            FailedPrecondition: the scheduler has requests.
        """
        if self.has_work:
            raise FailedPrecondition(
                "the prefix cache can only be cleared while the node has no requests"
            )
        return self._cache.flush()

    # Prompts in a data-parallel group.

    @property
    def is_chunking(self) -> bool:
        """Return whether a prompt is partly computed."""
        return self._admission.chunked is not None

    @property
    def has_prefill_room(self) -> bool:
        """Return whether there is a slot for another prompt."""
        return self._admission.has_slot()

    # The next forward.

    def split_prefills(self, limits: GroupLimits) -> None:
        """Compute prompts in groups of layers from now on."""
        self._split = SplitSelector(
            self.rows,
            limits,
            table=self._table,
            admission=self._admission,
            owners=self._owners,
            assembler=self._assembler,
            launched=self._launched,
        )

    def next_batch(self) -> ScheduleBatch | None:
        """Choose the next forward. Return None if there is nothing to compute now.

        The caller must launch the batch before it calls this again.
        """
        self._cache.trim()
        if self.paused:
            return self._launch_rest()
        if self.preempts and self._admission.waiting:
            self._preempt_for_prompts()
        if self._retracted:
            self._swap_in()
        if self.running_alone is not None:
            return None  # no other row runs together with it
        selector = self.rows if self._split is None else self._split
        for kind in selector.kinds_to_try():
            if kind is StepKind.QUARANTINED and self._launched:
                return None  # earlier steps must finish first
            rows = selector.choose(kind)
            if rows is not None:
                return self._launch(rows, kind)
        # No rows to compute, but requests wait for pages that this step saves.
        if self._retracted.saving:
            return self._launch(NO_ROWS, StepKind.SHARED)
        return None

    def _preempt_for_prompts(self) -> None:
        """Preempt for the most urgent waiting request, unless a prompt is partly computed. The next
        prompt has to wait for that one anyway.
        """
        waiting = self._admission.waiting
        may_help = self._preemption.may_help(waiting.highest_priority)
        if may_help and self._admission.chunked is None and self._launched.split is None:
            first = waiting.most_urgent()
            self.preempt_for(first.spec.priority, self._admission.needed_pages(first))

    def _launch_rest(self) -> ScheduleBatch | None:
        """Launch the remaining layers of a split prefill."""
        if self._split is None or self._launched.split is None:
            return None
        return self._launch(self._split.choose_rest(), StepKind.SHARED)

    def _launch(self, rows: SelectedRows, kind: StepKind) -> ScheduleBatch:
        quarantined = kind is StepKind.QUARANTINED
        swaps = self._retracted.swaps() if self._retracted else NO_SWAPS
        decodes = DecodeRows(rows.decodes)
        if self._speculation is not None:
            verify = not (quarantined or rows.extends)
            decodes = self._speculation.rows(rows.decodes, verify=verify)
        if rows.layers is None:
            step = self._assembler.assemble(rows.extends, decodes, swaps)
        else:
            assert self._split is not None
            step = self._split.step(rows, rows.layers, swaps)
        if swaps.swap_in is not None:  # the retraction has already added the holds of swap_out
            self._pages.hold(swaps.swap_in.device_pages, PageHolder.STEP)
        self._table.hold(step.slots, step.batch.step)
        if len(decodes.slots):
            self._table.length[decodes.slots] += (
                ONE if decodes.drafts is None else decodes.drafts + ONE
            )
        for row in step.extends:
            if row.request.slot != row.slot:
                continue  # its request ended while its layers were computed in groups
            self._owners.record(row.slot, row.request)
            if row.samples:
                self._table.length[row.slot] += 1
                self._owners.run(row.slot, row.request)
        self._launched.append(step)
        self.running_alone = self._owners.by_slot[int(step.slots[0])] if quarantined else None
        return step.batch

    def _swap_in(self) -> None:
        """Swap in requests as far as there is capacity. Queue those whose KV is lost."""
        for request in self._retracted.take_lost():
            self._owners.put_back(request)
        most_urgent = max(self.kept.most_urgent, self._admission.waiting.highest_priority)
        self._retraction.swap_in(
            device_empty=self._owners.all_away,
            max_requests=self._admission.num_more_on_device,
            rank_to_exceed=self._preemption.rank_to_exceed(most_urgent),
        )

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> StepOutcome:
        """Apply the result of the oldest launched step."""
        step = self._launched.take(batch)
        speculation = self._speculation
        predicted = () if speculation is None else speculation.finish(batch, result.runs)
        outcome = self._results.apply(step, result, predicted)
        for pages in step.held():
            self._pages.drop(pages, PageHolder.STEP)
        self._retracted.swapped(step.swaps)
        self._table.drop_step(batch.step)
        self.running_alone = None
        if self._quarantine:
            self._quarantine.let_out()
        return outcome

    # State and counters.

    @property
    def has_work(self) -> bool:
        """Return whether there is any request. Safe to call from another thread."""
        return bool(self._owners or len(self._admission.waiting))

    @property
    def awaits_masks(self) -> bool:
        """Return whether a row waits for its mask, so that `expire` must be called in each poll."""
        return self._mask_waits.any

    @property
    def awaits_steps(self) -> bool:
        """Return whether steps are expected to finish regularly. Safe to call from another
        thread."""
        return self.has_work and not self.paused and not self._mask_waits.any

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting)

    @property
    def num_retracted(self) -> int:
        return len(self._retracted)

    @property
    def num_host_pages_used(self) -> int:
        """Number of host pages with the KV of retracted requests."""
        return self._retracted.num_host_pages_used

    def queued_tokens(self) -> int:
        """Return the number of prompt tokens that are admitted and not computed yet."""
        return self._admission.under_way.num_tokens

    def queues(self) -> dict[str, int]:
        """Return the number of requests in each queue. Safe to call from another thread."""
        return {
            "waiting": len(self._admission.waiting),
            "chunked": int(self._admission.chunked is not None),
            "on_device": self._owners.num_on_device,
            "retracted": len(self._retracted),
        }

    def waiting_by_class(self) -> Counter[PriorityClass]:
        return self._admission.waiting.by_class()

    def counters(self) -> dict[str, int]:
        return {
            "generated_tokens": self._results.num_tokens,
            "finished": self._owners.num_ended + self._num_withdrawn,
            "deadlines": self._num_late,
            "steps": self._assembler.num_steps,
            "retractions": self._retraction.num_retractions,
            "recomputed": self._retraction.num_recomputed,
            **{f"preempted/{name}": n for name, n in self._preemption.counts.items()},
            **(self._speculation.counters() if self._speculation is not None else {}),
            "prompt_tokens": self._admission.admitted_tokens,
            "cached_tokens": self._admission.cached_tokens,
        }

    def distributions(self) -> dict[str, HistogramCounts]:
        return {} if self._speculation is None else self._speculation.distributions()

    def check_idle(self, elsewhere: Mapping[PageHolder, Iterable[Pages]] = _NOTHING) -> None:
        """Check that every page, host page and slot has a known holder. Reset the new-token ratio
        if idle.

        Args:
            elsewhere: pages that the caller or others hold, by kind of holder. One array per hold.
        Raises:
            EngineFault: a page or slot leaked, or was allocated twice.
        """
        check_books(self._core, self._owners, self._retracted, [*self._launched], elsewhere)
        if not self.has_work:
            self._running.ratio.reset()
