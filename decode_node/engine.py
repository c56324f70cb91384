"""Engine process of a decode node."""

from common.config import DecodeConfig, EngineConfig
from common.errors import ConfigError
from decode_node.active_requests import ActiveRequests, DecodeCounters, TokenOutbox
from decode_node.admission import PrefixLocations, RequestAdmission
from decode_node.canary import STREAM, Canary
from decode_node.handoffs import HandoffLimits, IncomingHandoffs
from decode_node.outgoing_migrations import OutgoingMigrations
from decode_node.placement import PrefillPlacement
from decode_node.queues import DecodeQueues, FetchQueue, PausedQueue, UnpairedQueue
from decode_node.role import DecodeRole
from decode_node.state import DecodeState, PageReservations
from engine.batch.holding import PageHolding
from engine.batch.limits import TokenBudget
from engine.batch.request import Request
from node.queues import AdapterQueue, GrammarQueue, PreparationStages, SchedulerQueue, TierLoadQueue
from node.request_state import Claim
from node.role_parts import RoleEngine, RoleRuntime
from node.sharing.prefixes import PrefixSharing
from node.timings import RequestHistory, RequestTimings


def wants(config: EngineConfig) -> EngineConfig:
    """Return the configuration unchanged: a decode node uses all of an engine."""
    return config


def check(engine: RoleEngine) -> None:
    """Raise ConfigError if a decode node cannot serve the engine's model."""
    if not engine.core.limits.generates:
        raise ConfigError("the model has no language model head: only prefill nodes can serve it")


def make_role(engine: RoleEngine, runtime: RoleRuntime, config: DecodeConfig) -> DecodeRole:
    """Assemble the role from an engine and the parts that do not depend on the role."""
    control, sharing = runtime.control, runtime.sharing
    active = _make_active(engine, runtime, config)
    scheduled = _make_scheduled(engine, runtime, config, active)
    handoffs = _make_handoffs(engine, runtime, config, active, scheduled)
    queues = _make_queues(engine, sharing, config, scheduled, handoffs)
    migrations = OutgoingMigrations(
        scheduler=scheduled.scheduler,
        pages=engine.core.pages,
        tables=engine.core.shape.tables,
        page_bytes=engine.page_bytes,
        port=runtime.port,
        active=active,
    )
    sharing.exports.learn_by(migrations.copied)
    admission = RequestAdmission(
        max_waiting=config.engine.scheduler.max_queued_requests,
        limits=engine.core.limits,
        control=control,
        active=active,
        adapters=engine.adapters,
        locations=PrefixLocations(
            engine.core.cache, engine.core.tiers, shares=config.prefix_sharing.enabled
        ),
        queues=queues,
    )
    canary = Canary(
        num_tokens=config.transfer.canary_tokens,
        vocabulary_size=engine.core.limits.vocabulary_size,
        submit=admission.submit,
        is_busy=lambda: control.draining or scheduled.scheduler.paused or queues.num_waiting > 0,
        counts=active.counters,
    )
    active.outbox.listen(STREAM, canary.take)
    placement = PrefillPlacement(
        config,
        queues=queues,
        cache=engine.core.cache,
        handoffs=handoffs,
        sharing=sharing,
        canary=canary,
        counters=active.counters,
    )
    return DecodeRole(
        runtime,
        queues=queues,
        active=active,
        admission=admission,
        placement=placement,
        handoffs=handoffs,
        migrations=migrations,
        canary=canary,
    )


def _make_active(engine: RoleEngine, runtime: RoleRuntime, config: DecodeConfig) -> ActiveRequests:
    # Limit for all requests: the tokens that fit into the pool and those that may wait.
    max_tokens = engine.core.shape.tables.max_tokens(engine.core.pages.num_pages)
    return ActiveRequests(
        TokenOutbox(runtime.channel),
        TokenBudget(config.engine.scheduler.max_queued_tokens + max_tokens),
        RequestHistory(RequestTimings),
        DecodeCounters(),
    )


def _make_scheduled(
    engine: RoleEngine, runtime: RoleRuntime, config: DecodeConfig, active: ActiveRequests
) -> SchedulerQueue[DecodeState]:
    sharing = runtime.sharing

    def admitted(request: Request, holding: PageHolding) -> None:
        sharing.admitted(request)
        state = active.find(request)
        if state is not None:
            state.claims.add(Claim.FETCH, lambda: sharing.forget(request.key))

    return SchedulerQueue(engine.scheduler(config.engine, admitted), active.find)


def _make_handoffs(
    engine: RoleEngine,
    runtime: RoleRuntime,
    config: DecodeConfig,
    active: ActiveRequests,
    scheduled: SchedulerQueue[DecodeState],
) -> IncomingHandoffs:
    return IncomingHandoffs(
        runtime.port,
        scheduled=scheduled,
        reservations=PageReservations(
            scheduler=scheduled.scheduler,
            pages=engine.core.pages,
            cache=engine.core.cache,
            tables=engine.core.shape.tables,
            tiers=engine.core.tiers,
            page_bytes=engine.page_bytes,
        ),
        active=active,
        limits=HandoffLimits(
            runtime.instance,
            engine.core.limits.vocabulary_size,
            config.max_inflight_pages or engine.core.pages.num_pages // 2,
        ),
    )


def _make_queues(
    engine: RoleEngine,
    sharing: PrefixSharing,
    config: DecodeConfig,
    scheduled: SchedulerQueue[DecodeState],
    handoffs: IncomingHandoffs,
) -> DecodeQueues:
    scheduler = scheduled.scheduler
    return DecodeQueues(
        preparing=PreparationStages(
            scheduled.backlog,
            GrammarQueue(engine.guides),
            AdapterQueue(engine.adapters),
            TierLoadQueue(engine.core.tiers, lambda: scheduler.free_capacity().num_pages),
        ),
        paused=PausedQueue(scheduler),
        unpaired=UnpairedQueue(config.reconnect_wait_s),
        fetching=FetchQueue(sharing.fetches),
        prealloc=handoffs.prealloc,
        transfer=handoffs.transfer,
        scheduled=scheduled,
    )
