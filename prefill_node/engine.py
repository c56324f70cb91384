"""Engine process of a prefill node."""

from collections.abc import Callable

from common.config import EngineConfig, PrefillConfig
from engine.batch.holding import PageHolding
from engine.batch.request import Request
from engine.batch.token_budget import TokenBudget
from engine.build import Engine
from node.engine_process import EngineStart
from node.preparations import AdapterQueue, GrammarQueue, PreparationStages, TierLoadQueue
from node.queues import SchedulerQueue
from node.request_state import RequestState
from node.runtime import NodeRuntime, RoleRuntime
from node.sharing.fetches import PrefixFetchQueue
from prefill_node.admission import HandoffAdmission, PrefillQueues, PrefillState
from prefill_node.handoffs import HandoffHistory, OutgoingHandoffs
from prefill_node.pooling import PoolingCalls
from prefill_node.role import PrefillRole

CHUNK_TOKENS = 8192  # no decode rows wait for a chunk here, and large chunks are efficient


def wants(config: EngineConfig) -> EngineConfig:
    """Return the configuration without the parts that a prefill node does not use.

    Requests end with their first token, so none is retracted to host memory, and no step has decode
    rows only.
    """
    cache = config.cache.model_copy(update={"swap_pages": 0})
    chunk = config.scheduler.auto_chunk_tokens or CHUNK_TOKENS
    scheduler = config.scheduler.model_copy(update={"auto_chunk_tokens": chunk})
    return config.model_copy(update={"cache": cache, "scheduler": scheduler, "cuda_graphs": False})


def check(engine: Engine) -> None:
    """Accept every engine."""


def serve(
    engine: Engine, start: EngineStart[PrefillConfig], prepare: Callable[[str], None]
) -> None:
    """Serve until the node process disconnects (PeerGone) or changes the role (RoleEnded).

    Args:
        engine: built with the configuration that `wants` returned, or prepared with it for a change
            of role.
        prepare: see EngineControl.
    """
    runtime = NodeRuntime.of(engine, start, prepare)
    runtime.run(make_role(engine, runtime, start.config), engine, start)


def make_role(engine: Engine, runtime: RoleRuntime, config: PrefillConfig) -> PrefillRole:
    """Assemble the role from an engine and the parts that do not depend on the role."""
    control, sharing, steps = runtime.control, runtime.sharing, config.engine.scheduler

    def find(request: Request) -> RequestState | None:
        owner = handoffs if request.pooling is None else pooling
        return owner.find(request)

    def admitted(request: Request, holding: PageHolding) -> None:
        if request.pooling is None:
            handoffs.admitted(request, holding)

    scheduler = engine.scheduler(config.engine, admitted)
    scheduled = SchedulerQueue(scheduler, find)
    preparing: PreparationStages[PrefillState] = PreparationStages(
        scheduled.backlog,
        GrammarQueue(engine.guides),
        AdapterQueue(engine.adapters),
        TierLoadQueue(engine.tiers, lambda: scheduler.free_capacity().num_pages),
        PrefixFetchQueue(sharing.fetches),
    )
    queues = PrefillQueues(preparing, scheduled)
    tokens = TokenBudget(steps.max_queued_tokens)  # of prompts without pages
    admission = HandoffAdmission(
        max_waiting=steps.max_queued_requests,
        limits=engine.limits,
        scheduler=scheduler,
        control=control,
        adapters=engine.adapters,
        backlog=scheduled.backlog,
        tokens=tokens,
    )
    handoffs = OutgoingHandoffs(
        admission,
        queues=queues,
        history=HandoffHistory(control.notify),
        pages=engine.pages,
        tables=engine.shape.layout.tables,
        port=runtime.port,
        sharing=sharing,
    )
    pooling = PoolingCalls(
        scheduled,
        limits=engine.limits,
        max_waiting=steps.max_queued_requests,
        tokens=tokens,
        control=control,
    )
    return PrefillRole(
        queues,
        handoffs=handoffs,
        pooling=pooling,
        sharing=sharing,
        control=control,
        port=runtime.port,
    )
