"""The engine process of a node: one engine, and one role after another that uses it.

Parts that only one role needs, such as the host pages and CUDA graphs of a decode node, exist only
for that role. They are created before it starts, while the previous role is idle. Weights, pool and
prefix cache stay.
"""

from collections.abc import Callable
from typing import Any

from common.config import NODE_CONFIGS, EngineConfig
from common.process.ipc import PeerGone
from engine.build import Engine, build
from engine.ranks.node_group import NodeGroup, join_group
from node.control.engine_control import RoleEnded
from node.engine_process import Begin, EngineStart, run_engine
from node.messages import StartRole
from node.role_parts import load_roles
from node.runtime import NodeRuntime


def body(begin: Begin, first: StartRole) -> None:
    """Serve in one role after another, as the frontend requests, until it releases this process.
    After a fault the engine is not closed: see NodeRuntime.run.
    """
    start = begin(first)
    config: EngineConfig = start.config.engine
    roles = load_roles()
    relay = ("node.hosts.relay", start.config.server.model_dump_json())
    group = _joined(start) if config.parallel.dp > 1 else None
    engine = build(roles[start.role].wants(config), "node.follower", relay, group)
    prepared: dict[str, Engine] = {}

    def prepare(name: str) -> None:
        role = roles[name]
        role.check(engine)
        prepared[name] = engine.equipped(role.wants(config))

    try:
        engine.guides.notify = engine.loader.notify = engine.weights.notify = start.channel.wake
        _notify(engine, start.channel.wake)
        roles[start.role].check(engine)
        if group is not None:
            group.meet()
        while True:
            try:
                runtime = NodeRuntime.of(engine, start, prepare)
                made = roles[start.role].make_role(engine, runtime, start.config)
                runtime.run(made, engine, start)
            except RoleEnded as over:
                successor = over.successor
            start, engine = begin(successor), prepared.pop(successor.role)
            engine.equip_followers()
            _notify(engine, start.channel.wake)
    except PeerGone:
        engine.close()
        raise


def _notify(engine: Engine, wake: Callable[[], None]) -> None:
    """Make the parts of a role call `wake` when they have work for the engine thread."""
    engine.backend.copier.notify = wake
    if engine.encoder is not None:
        engine.encoder.notify = wake


def _joined(start: EngineStart[Any]) -> NodeGroup:
    """Join the group of this node. The end of another node interrupts the engine thread's waits."""
    engine: EngineConfig = start.config.engine
    own = engine.parallel.model_copy(update={"dp_rank": 0, "dp_group": None})
    common = engine.model_copy(update={"parallel": own})
    settings = f"{start.role} {common.model_dump_json()}"
    group = join_group(engine.parallel, settings, start.channel.wakeup)
    start.channel.watch(group.lockstep.ended)
    return group


if __name__ == "__main__":
    run_engine(NODE_CONFIGS, body, "engine")
