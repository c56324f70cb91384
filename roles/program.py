"""A node's front: the programs of both roles, and the configuration of each.

A node has the flags of the role that it begins in. What the other one has besides keeps its
defaults there.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

import decode_node.program
import prefill_node.program
from common import settings
from common.config import DecodeConfig, NodeConfig, PrefillConfig
from common.errors import ConfigError, WrongState
from common.metrics import Role
from common.node.front.front import run_node
from common.node.front.parts import RoleProgram

CONFIGS: Mapping[str, type[NodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}
PROGRAMS: Mapping[str, Callable[[Any], RoleProgram]] = {
    "prefill": prefill_node.program.program,
    "decode": decode_node.program.program,
}


def main(role: Role) -> int:
    """Runs a node that begins in this role, and returns its exit code."""
    config = settings.read(CONFIGS[role], f"baton {role}", sys.argv[1:])
    program = PROGRAMS[role](config)
    return run_node(program, engine_module="roles.engine", other=partial(other, program))


def other(begun: RoleProgram, role: str) -> RoleProgram:
    """A role of a node that has begun in another one, or in the same.

    Raises:
        ConfigError, WrongState: it cannot have that role.
    """
    if role == begun.role:
        return begun
    if begun.mode == "colocated":
        raise WrongState("this node is colocated: such nodes read from no prefill node")
    return PROGRAMS[role](config_of(begun.config, role))


def config_of(config: NodeConfig, role: str) -> NodeConfig:
    """What roles have in common, of a role's configuration, for another one.

    Raises:
        ConfigError: that role cannot do with it.
    """
    record = CONFIGS[role]
    fields = record.model_fields.items()
    try:
        return record(**{name: getattr(config, name, field.default) for name, field in fields})
    except ValidationError as error:
        reasons = (each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise ConfigError(f"as a {role} node: {'; '.join(reasons)}") from error
