"""The engine process of a node: one engine, and one role after the other on top of it.

What a role alone needs, the host pages and the graphs of a decode node, is made before it begins,
while the one before is idle, and dropped when it ends. Weights, pool and prefix cache stay.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import decode_node.engine
import prefill_node.engine
from common.config import DecodeConfig, EngineConfig, NodeConfig, PrefillConfig
from common.engine.build import Engine, build
from common.node.desk.desk import RoleOver
from common.node.engine_process import Begin, EngineStart, run_engine
from common.node.ipc import PeerGone
from common.node.messages import Start


@dataclass(frozen=True, slots=True)
class EngineRole:
    """
    Attributes:
        wants: what of an engine it has use for.
        check: raises ConfigError where an engine cannot have it.
        serve: until RoleOver or PeerGone.
    """

    config: type[NodeConfig]
    wants: Callable[[EngineConfig], EngineConfig]
    check: Callable[[Engine], None]
    serve: Callable[[Engine, EngineStart[Any], Callable[[str], None]], None]


ROLES: Mapping[str, EngineRole] = {
    "prefill": EngineRole(
        PrefillConfig,
        prefill_node.engine.without_decode,
        lambda engine: None,
        prefill_node.engine.serve,
    ),
    "decode": EngineRole(
        DecodeConfig, lambda config: config, decode_node.engine.check, decode_node.engine.serve
    ),
}


def body(begin: Begin, first: Start) -> None:
    """Serves in one role after the other, as the front says, until it lets this process go. After
    a fault the engine is not closed: see EngineParts.run."""
    start = begin(first)
    config: EngineConfig = start.config.engine
    engine = build(ROLES[start.role].wants(config))
    prepared: dict[str, Engine] = {}

    def prepare(name: str) -> None:
        role = ROLES[name]
        role.check(engine)
        prepared[name] = engine.equipped(role.wants(config))

    try:
        engine.guides.tell = engine.loader.tell = engine.weights.tell = start.channel.wake
        engine.copier.tell = start.channel.wake
        ROLES[start.role].check(engine)
        while True:
            try:
                ROLES[start.role].serve(engine, start, prepare)
            except RoleOver as over:
                successor = over.successor
            start, engine = begin(successor), prepared.pop(successor.role)
            engine.copier.tell = start.channel.wake
    except PeerGone:
        engine.close()
        raise


if __name__ == "__main__":
    run_engine({name: role.config for name, role in ROLES.items()}, body, "engine")
