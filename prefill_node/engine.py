"""Engine process of a prefill node."""

from collections.abc import Callable

from common.config import EngineConfig, PrefillConfig
from engine.build import Engine
from node.engine_process import EngineStart
from node.runtime import NodeRuntime
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
        prepare: see Desk.
    """
    config = start.config.engine
    parts = NodeRuntime.of(engine, start, prepare)
    role = PrefillRole(
        make_scheduler=lambda on_admit: engine.scheduler(config, on_admit),
        pages=engine.pages,
        tables=engine.shape.layout.tables,
        limits=engine.limits,
        max_waiting=config.scheduler.max_queued_requests,
        max_waiting_tokens=config.scheduler.max_queued_tokens,
        port=parts.port,
        desk=parts.desk,
        adapters=engine.adapters,
        guides=engine.guides,
        sharing=parts.sharing,
        tiers=engine.tiers,
    )
    parts.run(role, engine, start)
