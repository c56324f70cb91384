"""Operators' commands in a scenario: role changes, drains, migrations and pauses."""

import asyncio
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import grpc
import grpc.aio

from common.errors import ConfigError
from simulation.virtual.faults import At, Record, Seconds, target

if TYPE_CHECKING:
    from simulation.virtual.cluster import VirtualCluster

Role = Literal["prefill", "decode"]
PauseMode = Literal["abort", "retract", "in_place"]
# Status codes with which a cluster may reject a command. All others are errors of the cluster.
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@runtime_checkable  # a scenario is checked when it is read
class TimedCommand(Protocol):
    """A command at a given time. A key that differs by kind names the node.

    Attributes:
        at: seconds after the start of the load.
        optional: the cluster may reject it.
    """

    @property
    def at(self) -> float: ...

    @property
    def optional(self) -> bool: ...

    async def command(self, cluster: "VirtualCluster") -> None:
        """Send the command, and wait for its end. Raises AioRpcError if the cluster rejects it."""
        ...


class SetRole(Record, frozen=True):
    """A node changes to another role."""

    set_role: str
    role: Role
    at: At
    optional: bool = False

    async def command(self, cluster: "VirtualCluster") -> None:
        await cluster.set_role(self.set_role, self.role)


class Drain(Record, frozen=True):
    """A node is drained: its requests migrate, and it ends."""

    drain: str
    at: At
    optional: bool = False

    async def command(self, cluster: "VirtualCluster") -> None:
        await cluster.drain(self.drain)


class Migrate(Record, frozen=True):
    """One request of a decode node migrates."""

    migrate: str
    at: At
    optional: bool = False

    async def command(self, cluster: "VirtualCluster") -> None:
        await cluster.migrate(self.migrate)


class Pause(Record, frozen=True):
    """A node is paused for a time."""

    pause: str
    mode: PauseMode
    at: At
    seconds: Seconds
    optional: bool = False

    async def command(self, cluster: "VirtualCluster") -> None:
        try:
            await cluster.pause(self.pause, self.mode)
            await asyncio.sleep(self.seconds)
        finally:
            await cluster.resume(self.pause)


# Kinds of commands, by the key that names the node.
COMMANDS: dict[str, type[Record]] = {
    "set_role": SetRole,
    "drain": Drain,
    "migrate": Migrate,
    "pause": Pause,
}


def node_of(operation: TimedCommand) -> str:
    name: str = target(operation, COMMANDS)
    return name


async def carry_out(operation: TimedCommand, cluster: "VirtualCluster") -> None:
    """Execute a command, and wait for its end.

    Raises:
        ConfigError: the cluster rejects it, and it is not optional.
    """
    try:
        await operation.command(cluster)
    except grpc.aio.AioRpcError as error:
        if operation.optional and error.code() in _REFUSALS:
            return
        where = f"operations: {node_of(operation)} at {operation.at:g} s"
        raise ConfigError(f"{where}: {error.details()}") from error
