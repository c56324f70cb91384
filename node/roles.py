"""The start of a node's server process: RoleProgram and configuration of each role.

A node has the flags of its first role. Settings that only the other role has keep their defaults.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

from pydantic import ValidationError

from common import settings
from common.config import NODE_CONFIGS, NodeConfig
from common.errors import ConfigError, FailedPrecondition
from node.frontend.engine_link import RoleProgram
from node.frontend.frontend import EngineHandle, EngineProcess, run_node
from node.metrics import Role


def main(role: Role) -> int:
    """Run a node that starts in this role. Returns its exit code."""
    about = f"Run a {role} node."
    config = settings.read(NODE_CONFIGS[role], f"baton serve {role}", sys.argv[1:], about=about)
    program = program_of(role, config)
    return run_node(program, spawn=engine_of(config), other=partial(other, program))


def engine_of(config: NodeConfig) -> Callable[[], EngineHandle]:
    """Return a function that starts the engine of a node, see run_node. Simulated engines are
    imported by name, because their package depends on this one.
    """
    if not config.engine.simulated_gpu:
        return partial(EngineProcess, "node.engine_main")
    spawn: Callable[[], EngineHandle] = import_module("simulation.node.engine").SimEngine
    return spawn


def program_of(role: str, config: NodeConfig) -> RoleProgram:
    """Create the RoleProgram. Its package is imported by name, because it depends on this one."""
    program: RoleProgram = import_module(f"{role}_node.program").program(config)
    return program


def other(begun: RoleProgram, role: str) -> RoleProgram:
    """Return the RoleProgram of a role, for a node that started in `begun`.

    Raises:
        ConfigError, FailedPrecondition: the node cannot have that role.
    """
    if role == begun.role:
        return begun
    if begun.mode == "colocated":
        raise FailedPrecondition("this node is colocated and does not use prefill nodes")
    if begun.config.engine.parallel.dp > 1:
        raise FailedPrecondition("this node is in a group, whose nodes keep their role")
    return program_of(role, config_of(begun.config, role))


def config_of(config: NodeConfig, role: str) -> NodeConfig:
    """Return the configuration for another role, with the fields that both roles share.

    Raises:
        ConfigError: the configuration is invalid for that role.
    """
    record = NODE_CONFIGS[role]
    fields = record.model_fields.items()
    try:
        return record(**{name: getattr(config, name, field.default) for name, field in fields})
    except ValidationError as error:
        reasons = (each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise ConfigError(f"as a {role} node: {'; '.join(reasons)}") from error
