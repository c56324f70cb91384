"""Engine process of a decode node."""

from collections.abc import Callable

from common.config import DecodeConfig, EngineConfig
from common.errors import ConfigError
from decode_node.role import DecodeRole
from engine.build import Engine
from node.control.outbox import TokenOutbox
from node.engine_process import EngineStart
from node.runtime import NodeRuntime


def wants(config: EngineConfig) -> EngineConfig:
    """Return the configuration unchanged: a decode node uses all of an engine."""
    return config


def check(engine: Engine) -> None:
    """Raise ConfigError if a decode node cannot serve the engine's model."""
    if not engine.model.spec.generates:
        raise ConfigError("the model has no language model head: only prefill nodes can serve it")


def serve(engine: Engine, start: EngineStart[DecodeConfig], prepare: Callable[[str], None]) -> None:
    """Serve until the node process disconnects (PeerGone) or changes the role (RoleEnded).

    Args:
        prepare: see Desk.
    """
    config = start.config
    parts = NodeRuntime.of(engine, start, prepare)
    role = DecodeRole(
        config=config,
        instance=start.instance,
        scheduler=engine.scheduler(
            config.engine, lambda request, holding: parts.sharing.admitted(request)
        ),
        pages=engine.pages,
        cache=engine.cache,
        tables=engine.shape.layout.tables,
        page_bytes=engine.pool.page_bytes,
        limits=engine.limits,
        port=parts.port,
        desk=parts.control,
        outbox=TokenOutbox(start.channel),
        adapters=engine.adapters,
        guides=engine.guides,
        sharing=parts.sharing,
        tiers=engine.tiers,
    )
    parts.run(role, engine, start)
